"""What the runs of a study say: figures, intervals, verdicts, and what they were chosen by."""
