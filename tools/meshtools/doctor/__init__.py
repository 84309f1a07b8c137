"""`mesh doctor`: finds where a job's time goes by leaving out one stage at a time (DS-Analyzer's method).

Law: it measures the job's own loop over the job's own batches, and changes nothing. Every reported time
was measured in this run, as a difference between two runs; estimates are marked as such.
"""
