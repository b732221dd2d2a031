"""What clocks read of work whose duration is known, on a host and a GPU whose time the test counts."""

import pytest
import torch

from stackwise.benchmark.timing.clock import DeviceClock, HostClock, create_clock, time_call

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class TestHostClock:
    def test_reads_what_each_call_took(self, virtual_time):
        durations = [0.5, 2.0, 1e-6, 0.25]
        workload = virtual_time.workload(durations)
        assert HostClock(CPU).sample(workload.call, 4) == pytest.approx(durations)

    def test_a_sample_of_several_calls_is_their_mean(self, virtual_time):
        workload = virtual_time.workload([1.0, 2.0, 3.0, 10.0, 20.0, 30.0])
        assert HostClock(CPU).sample(workload.call, 2, repeats=3) == pytest.approx([2.0, 20.0])

    def test_what_comes_before_a_sample_is_no_part_of_it(self, virtual_time):
        order = []

        def call():
            order.append("call")
            virtual_time.take(1.0)

        def before():
            order.append("before")
            virtual_time.take(100.0)

        assert HostClock(CPU).sample(call, 2, repeats=2, before=before) == pytest.approx([1.0, 1.0])
        assert order == ["before", "call", "call"] * 2

    def test_waits_for_the_device_on_both_sides(self, simulated_gpu, virtual_time):
        simulated_gpu.launch(5.0)  # of somebody before
        start = virtual_time.ns
        assert HostClock(CUDA).sample(lambda: simulated_gpu.launch(0.001), 3) == pytest.approx([0.00101] * 3)
        # Without the waiting it is a launch that is timed, a hundredth of the work.
        virtual_time.ns = start
        unsynchronized = HostClock(CPU).sample(lambda: simulated_gpu.launch(0.001), 3)
        assert unsynchronized == pytest.approx([1e-5] * 3)

    def test_waits_for_what_came_before_too(self, simulated_gpu):
        clock = HostClock(CUDA)
        flush = lambda: simulated_gpu.launch(1.0)  # noqa: E731
        taken = clock.sample(lambda: simulated_gpu.launch(0.001), 2, before=flush)
        assert taken == pytest.approx([0.00101] * 2)

    def test_learns_nothing(self):
        assert HostClock(CPU).learn(pytest.fail) == 0


class TestDeviceClock:
    @pytest.mark.parametrize("seconds", [20e-6, 1e-3, 0.5])
    def test_reads_the_work(self, simulated_gpu, seconds):
        call = lambda: simulated_gpu.launch(seconds)  # noqa: E731
        clock = DeviceClock(CUDA)
        clock.learn(call)
        assert clock.sample(call, 5) == pytest.approx([seconds] * 5, rel=1e-6)
        assert clock.notes == ()

    def test_gaps_between_launches_are_no_part_of_it(self, simulated_gpu):
        def call():
            for _ in range(5):
                simulated_gpu.launch(2e-6)  # a fifth of what its launch takes the host

        clock = DeviceClock(CUDA)
        # As long as it has learned nothing of the call, the device waits for each launch.
        # The start of the second is passed while its first launch is still being made.
        assert clock.sample(call, 2) == pytest.approx([52e-6, 50e-6])
        assert clock.learn(call) == 6
        assert clock.sample(call, 4) == pytest.approx([10e-6] * 4)
        assert clock.sample(call, 4, repeats=7) == pytest.approx([10e-6] * 4)
        assert clock.notes == ()

    def test_a_call_that_waits_for_the_device_is_said_to(self, simulated_gpu):
        def call():
            simulated_gpu.launch(1e-3)
            simulated_gpu.synchronize()  # .item()
            simulated_gpu.launch(1e-3)

        clock = DeviceClock(CUDA)
        clock.learn(call)
        assert "the call waits for the device" in clock.notes[0]
        # The device idles while launches are made: of the first call both, of the next, which the host makes
        # while the device works, the one behind the waiting.
        assert clock.sample(call, 2) == pytest.approx([2e-3 + 20e-6, 2e-3 + 10e-6])

    def test_a_call_that_is_long_to_launch_is_said_to_be(self, simulated_gpu):
        def call():
            simulated_gpu.launch(1e-3, host_ns=70_000_000)

        clock = DeviceClock(CUDA)
        assert clock.learn(call) == 3
        assert clock.notes == (
            "one call takes the host 0.070 s to launch: gaps between launches are part of the time",
        )

    def test_a_sample_that_is_longer_to_launch_than_the_device_is_kept_busy(self, simulated_gpu):
        def call():
            simulated_gpu.launch(1e-7)

        clock = DeviceClock(CUDA)
        clock.learn(call)
        # 4000 launches of 10 us take 0.04 s, and twice that is as long as the device may be kept busy.
        assert clock.sample(call, 1, repeats=4000) == pytest.approx([1e-7])
        assert clock.notes == ()
        assert clock.sample(call, 1, repeats=30_000)[0] > 1e-6, "it waits for most of them"
        [note] = clock.notes
        assert note == (
            "a sample of 30000 calls takes the host 0.300 s to launch, and the device is kept busy for no "
            "more than 0.1 s: gaps between launches are part of the time"
        )

    def test_what_was_learned_of_another_call_is_forgotten(self, simulated_gpu, virtual_time):
        clock = DeviceClock(CUDA)
        clock.learn(lambda: simulated_gpu.launch(1e-3))
        clock.learn(lambda: simulated_gpu.launch(1e-3, host_ns=70_000_000))
        start = virtual_time.ns
        clock.sample(lambda: simulated_gpu.launch(1e-3), 1)
        assert virtual_time.ns - start == 1_010_000, "nothing was launched ahead of it"

    def test_without_a_way_to_keep_the_device_busy(self, simulated_gpu, monkeypatch):
        monkeypatch.delattr(torch.cuda, "_sleep")
        clock = DeviceClock(CUDA)
        assert clock.learn(pytest.fail) == 0
        assert "cannot keep the device busy" in clock.notes[0]

    def test_work_on_a_stream_of_its_own_is_missed_and_said_to_be(self, simulated_gpu):
        def call():
            simulated_gpu.launch(1e-4)
            simulated_gpu.launch(0.1, stream="side")

        clock = DeviceClock(CUDA)
        clock.learn(call)
        assert clock.sample(call, 2) == pytest.approx([1e-4] * 2)
        assert "work on other streams is no part of the time" in clock.notes[0]

    def test_work_on_a_stream_that_is_joined_is_timed(self, simulated_gpu):
        def call():
            simulated_gpu.join("side", "main")
            simulated_gpu.launch(0.1, stream="side")
            simulated_gpu.join("main", "side")

        clock = DeviceClock(CUDA)
        clock.learn(call)
        assert clock.sample(call, 3) == pytest.approx([0.1] * 3)
        assert clock.notes == ()

    def test_events_are_made_once_and_read_after_all_of_them(self, simulated_gpu):
        clock = DeviceClock(CUDA, capacity=4)
        assert simulated_gpu.events == 8
        before = simulated_gpu.synchronizations
        durations = iter([0.1 * n for n in range(1, 11)])
        taken = clock.sample(lambda: simulated_gpu.launch(next(durations)), 10)
        # Each begins on an idle device or behind the one before, and has a launch in it at most.
        assert taken == pytest.approx([0.1 * n for n in range(1, 11)], abs=2e-5)
        assert simulated_gpu.events == 8
        assert simulated_gpu.synchronizations - before == 2 * 3

    def test_what_comes_before_a_sample_is_no_part_of_it(self, simulated_gpu):
        call, flush = (lambda: simulated_gpu.launch(1e-4)), (lambda: simulated_gpu.launch(1.0))
        clock = DeviceClock(CUDA)
        assert clock.learn(call, flush) == 6
        assert clock.sample(call, 3, before=flush) == pytest.approx([1e-4] * 3)

    @pytest.mark.parametrize("capacity", [0, -1, 2.0, True])
    def test_capacity(self, simulated_gpu, capacity):
        with pytest.raises(ValueError, match=f"capacity: got {capacity}; allowed: an integer >= 1"):
            DeviceClock(CUDA, capacity=capacity)


def test_a_clock_by_its_name(simulated_gpu):
    assert isinstance(create_clock("host", CPU), HostClock)
    assert create_clock("host", CUDA).name == "host"
    assert create_clock("device", CUDA).name == "device"
    mine = HostClock(CPU)
    assert create_clock(mine, CUDA) is mine


def test_there_is_no_device_clock_of_a_processor():
    with pytest.raises(ValueError, match="clock: got 'device'; allowed: 'host' on cpu, which has no events"):
        create_clock("device", CPU)


@pytest.mark.parametrize("name", ["Host", "cuda", ""])
def test_other_names(name):
    with pytest.raises(ValueError, match=f"clock: got {name!r}; allowed: 'host', 'device'"):
        create_clock(name, CPU)


def test_time_of_a_call(virtual_time):
    assert time_call(lambda: virtual_time.take(2.5), CPU) == pytest.approx(2.5)


def test_time_of_a_call_on_cuda(simulated_gpu):
    simulated_gpu.launch(3.0)
    assert time_call(lambda: simulated_gpu.launch(2.5), CUDA) == pytest.approx(2.50001)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnAGpu:
    """No time is asserted: that what is read is a time, and that the notes tell the two calls apart."""

    @pytest.fixture
    def matrix(self):
        return torch.randn(512, 512, device="cuda")

    def test_a_call_that_runs_ahead(self, matrix):
        clock = DeviceClock(CUDA, capacity=8)
        call = lambda: matrix @ matrix  # noqa: E731
        call()
        assert clock.learn(call) == 6
        assert all(seconds > 0 for seconds in clock.sample(call, 20, repeats=3))
        assert clock.notes == ()

    def test_a_call_that_waits(self, matrix):
        clock = DeviceClock(CUDA)
        call = lambda: (matrix @ matrix).sum().item()  # noqa: E731
        call()
        clock.learn(call)
        assert "the call waits for the device" in clock.notes[0]
