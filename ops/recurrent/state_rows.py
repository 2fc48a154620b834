"""StateRows: where the layers with a state find those of a step's requests, and where they leave them."""

from typing import NamedTuple

from torch import Tensor

SINK_SLOT = 0


class StateRows(NamedTuple):
    """All int32, on the step's device. R requests of the bucket, W writes of a request.

    A request without tokens before this step starts from zeros, whatever its slot holds: slots are never cleared.
    Slot 0 is the sink, which nobody reads. No slot but the sink is written to twice in a step, and a slot that a
    request writes to is read by that request alone.
    """

    read_slot: Tensor  # [R] the slot with the state that the request's first token follows
    write_slot: Tensor  # [R, W] slots that its state goes to ...
    write_after: Tensor  # [R, W] ... after so many of its tokens in this step; 0: this one is not used
