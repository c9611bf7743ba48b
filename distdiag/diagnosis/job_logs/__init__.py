"""Diagnosis of a job's logs."""
