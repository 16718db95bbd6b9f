# CONTROL nproc=3 rc=0
"""No torch, no groups: the ranks have nothing to be in step with."""

import os
import time

rank = int(os.environ["RANK"])
if rank == 2:
    time.sleep(12)
print("rank", rank, "done")
