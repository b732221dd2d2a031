"""FLOPs and bytes of a call, and the utilization of the device."""

from stackwise.benchmark.flops.closed_form import FlopCount, convention_flops_per_token, model_flops
from stackwise.benchmark.flops.counted import CountedFlops, count_flops
from stackwise.benchmark.flops.decode_bytes import DecodeBytes
from stackwise.benchmark.flops.measured_peak import measure_peak
from stackwise.benchmark.flops.peak_rate import PeakRate, published_peak
from stackwise.benchmark.flops.roofline import Roofline, decode_floor
from stackwise.benchmark.flops.shape_reader import read_shape
from stackwise.benchmark.flops.transformer_shape import TransformerShape
from stackwise.benchmark.flops.utilization import Utilization, hfu, mbu, mfu

__all__ = [
    "CountedFlops",
    "DecodeBytes",
    "FlopCount",
    "PeakRate",
    "Roofline",
    "TransformerShape",
    "Utilization",
    "convention_flops_per_token",
    "count_flops",
    "decode_floor",
    "hfu",
    "mbu",
    "measure_peak",
    "mfu",
    "model_flops",
    "published_peak",
    "read_shape",
]
