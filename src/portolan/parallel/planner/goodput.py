"""Time lost to checkpoints, failures and restarts.

Failures are independent and exponential. Expected time: Daly, "A higher order estimate of the
optimum checkpoint interval for restart dumps", FGCS 22 (2006), equation 20; best interval: its
equation 37, whose first term is Young's (CACM 17, 1974).
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Failures:
    """Mean time M between failures of the whole job, time R to detect one and start again, time
    delta that a checkpoint stops training; all in seconds."""

    mean_seconds: float
    restart_seconds: float
    checkpoint_seconds: float

    def goodput(self, interval_seconds: float) -> float:
        """Share of the time that trains: tau / (M e^(R/M) (e^((tau + delta)/M) - 1)).

        `interval_seconds` tau is the training time between two checkpoints. A failure costs R and
        what was trained since the last checkpoint.
        """
        mean = self.mean_seconds
        exponent = (interval_seconds + self.checkpoint_seconds) / mean
        if exponent + self.restart_seconds / mean > 700:
            return 0.0
        lost = mean * math.exp(self.restart_seconds / mean) * math.expm1(exponent)
        return interval_seconds / lost

    @property
    def best_interval_seconds(self) -> float:
        """Interval that loses least: sqrt(2 delta M) (1 + x/3 + x^2/9) - delta, with
        x = sqrt(delta / 2M); M where a checkpoint takes longer than 2 M."""
        delta, mean = self.checkpoint_seconds, self.mean_seconds
        if delta >= 2 * mean:
            return mean
        x = math.sqrt(delta / (2 * mean))
        return math.sqrt(2 * delta * mean) * (1 + x / 3 + x * x / 9) - delta


def failures_of_job(
    num_devices: int,
    mean_hours_of_device: float,
    restart_seconds: float,
    checkpoint_seconds: float,
) -> Failures:
    """Failures of a job that stops when any of its devices does."""
    mean = mean_hours_of_device * 3600 / num_devices
    return Failures(mean, restart_seconds, checkpoint_seconds)
