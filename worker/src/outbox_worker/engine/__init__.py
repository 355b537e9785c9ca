"""The loop, the partition runners, and the steps that they carry out."""
