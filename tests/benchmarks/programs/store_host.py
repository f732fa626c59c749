"""Host torchrun's store outside the nodes, so that the run does not end with the node that hosts it: ADDRESS PORT."""

from __future__ import annotations

import sys
import threading
from datetime import timedelta

from torch.distributed import TCPStore

store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False, timeout=timedelta(hours=1))
threading.Event().wait()
