"""The Kubernetes operator: resources, planners, controllers and the admission webhook.

Law: `planners` decides purely, `controllers` acts. Of our packages the operator imports `meshwire`
alone. The folder above must never become a package named `operator`: it would shadow the standard
library's module.
"""
