"""End to end on a real cluster: images, chart, operator and daemons under real kubelets (`make e2e`)."""
