"""Our own throughput suites, and one command for each claim that we make in public.

Idle threads sleep in all of them: it is settled here, before any of them loads torch.
"""

from stackwise.support.wait_policy import default_wait_policy

default_wait_policy()
