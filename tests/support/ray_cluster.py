"""What jobs with a cluster of Ray need on a small machine that others use as well."""

START_TIMEOUT_S = 400
"""A job is a dozen programs before it begins to train."""
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    # After its 60 seconds Ray ends workers that still import torch, and starts others, for ever.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(START_TIMEOUT_S),
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # one program less
}
