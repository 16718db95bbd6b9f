"""Is every rank in step? Records of each rank, the verdict over all of them, the line where one left the common path.

The recorder lives in the ranks, the watch outside of them: it works when a rank is frozen. Nothing here imports torch
when it is imported.
"""
