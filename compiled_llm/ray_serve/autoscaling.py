"""How many engines there should be: by the requests that they have and by the KV blocks in use.

Ray Serve calls it now and then, and keeps to the bounds and delays of its ``autoscaling_config``. It copies this module
into its controller, so nothing but the standard library is imported here.
"""

from typing import Any

KV_USE = "kv_use"  # the name of what engines report: the share of their KV blocks in use, 0 to 1


class QueueAndKvUse:
    """As many engines as bring both the requests and the KV blocks of each down to what is aimed at.

    Args:
        target_kv_use: share of an engine's KV blocks in use, above 0. What it aims at in requests, those that run and
            those that wait, is ``target_ongoing_requests`` of the ``autoscaling_config``.

    Raises:
        ValueError: ``target_kv_use`` is out of range.
    """

    def __init__(self, target_kv_use: float = 0.7) -> None:
        if not 0 < target_kv_use <= 1:
            raise ValueError(f"target_kv_use must be above 0 and at most 1, given {target_kv_use}")
        self._target_kv_use = target_kv_use

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """``context``: Ray Serve's ``AutoscalingContext``. Returns how many engines, and no state."""
        by_requests = context.total_num_requests / context.config.target_ongoing_requests
        used = (context.aggregated_metrics or {}).get(KV_USE, {})
        return max(by_requests, sum(used.values()) / self._target_kv_use), {}
