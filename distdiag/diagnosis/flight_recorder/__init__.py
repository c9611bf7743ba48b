"""Diagnosis of flight recorder dumps."""
