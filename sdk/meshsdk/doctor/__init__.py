"""`mesh doctor`: finds where a job's time goes by leaving out one stage at a time (DS-Analyzer's method).

Law: it measures the job's own loop over the job's own batches and edits nothing. Reported times were
measured in this run, by difference; estimates are marked as such.
"""
