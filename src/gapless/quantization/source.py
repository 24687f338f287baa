"""Where in a checkpoint the values of a weight are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gapless.graph.ir import Weight
from gapless.loading import TensorInfo


@dataclass(frozen=True)
class TensorSource:
    """A weight of the graph is a tensor of the checkpoint, or some of its rows, plus a constant."""

    weight: Weight
    info: TensorInfo
    row_map: npt.NDArray[np.int32] | None  # the tensor's row for each row of the weight; None: all in order
    add: float  # to every value

    @property
    def nbytes(self) -> int:
        """The weight's share of the tensor's bytes."""
        return self.info.nbytes * self.weight.shape[0] // max(1, self.info.shape[0])
