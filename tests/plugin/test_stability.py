"""Stability as tests: `stability_run` trains what it is given and breaks it as the markers say."""

import math

import pytest

FAULTS = [
    ("nan_injection(step=5)", [5], "non-finite loss"),
    ("nan_injection(step=5, kind='inf')", [5], "non-finite loss"),
    ("nan_injection(step=0, target='loss')", [0], "non-finite loss"),
    ("nan_injection(step=15, target='gradient')", [15], "non-finite gradient"),
    ("nan_injection(step=5, target='activation:*e*d*', duration=3)", [5, 6, 7], "non-finite loss"),
    ("gradient_explosion(step=6)", [6], "gradient spike"),
    ("gradient_explosion(step=6, factor=50, duration=2)", [6, 7], "gradient spike"),
    ("gradient_scale(step=6, factor=30)", [6], "gradient spike"),
    ("loss_spike(step=6, factor=1000)", [6], "gradient spike"),
    ("half_overflow(step=6)", [6], "non-finite loss"),
]


@pytest.mark.parametrize("model", ["plain", "rack"])
@pytest.mark.parametrize(("marker", "steps", "kind"), FAULTS, ids=[marker for marker, _, _ in FAULTS])
def test_fault_is_injected_and_caught(pytester, run, report, model, marker, steps, kind):
    pytester.makepyfile(
        f"""
        import models, pytest
        @pytest.mark.{marker}
        def test_fault(stability_run):
            run = stability_run(models.{model})
            assert run.alarm_steps == {steps}
            assert {{alarm.kind for alarm in run.alarms}} == {{{kind!r}}}
            assert [r.step for r in run.records if r.skipped] == {steps}
        """
    )
    run("--stackwise-report=out.json").assert_outcomes(passed=1)
    (record,) = report()["stability"]
    assert record["test"].endswith("::test_fault")
    assert (record["model"], record["seq_len"], record["fired"]) == (model, 16, steps)
    assert [alarm["step"] for alarm in record["alarms"]] == steps
    # A step whose gradient alone was broken is made again.
    again = len(steps) if all(alarm["action"] == "retried" for alarm in record["alarms"]) else 0
    assert len(record["records"]) == 16 + again
    assert {each["step"] for each in record["records"]} == set(range(16))


def test_named_module_of_a_rack_is_the_one_that_breaks(pytester, run):
    pytester.makepyfile(
        """
        import models, pytest
        @pytest.mark.nan_injection(step=5, target="activation:*blocks.1.attention")
        def test_fault(stability_run):
            (alarm,) = stability_run(models.rack).alarms
            assert alarm.where == "stacks.0.blocks.1.attention (forward)"
        """
    )
    run().assert_outcomes(passed=1)


def test_pattern_that_matches_a_container_breaks_a_module_that_is_called(pytester, run):
    pytester.makepyfile(
        """
        import models, pytest
        @pytest.mark.nan_injection(step=5, target="activation:stacks*")
        def test_fault(stability_run):
            assert stability_run(models.rack).alarm_steps == [5]
        """
    )
    run().assert_outcomes(passed=1)


def test_stacked_markers_all_act_the_topmost_first(pytester, run, report):
    pytester.makepyfile(
        """
        import models, pytest
        @pytest.mark.nan_injection(step=2, target="loss")
        @pytest.mark.gradient_explosion(step=8)
        @pytest.mark.nan_injection(step=11, kind="inf")
        def test_faults(stability_run):
            assert stability_run(models.plain).alarm_steps == [2, 8, 11]
        """
    )
    run("--stackwise-report=out.json").assert_outcomes(passed=1)
    assert sorted(report()["stability"][0]["faults"]) == [
        "gradient_explosion(step=8)",
        "nan_injection(step=11, target='activation:head', kind='inf')",
        "nan_injection(step=2, target='loss')",
    ]


def test_faults_of_the_call_join_those_of_the_markers(pytester, run):
    pytester.makepyfile(
        """
        import models, pytest
        from stackwise.stability import NanInjection
        @pytest.mark.nan_injection(step=2)
        def test_faults(stability_run):
            assert stability_run(models.plain, faults=[NanInjection(step=4)]).alarm_steps == [2, 4]
            assert stability_run(models.plain).alarm_steps == [2]
        """
    )
    run().assert_outcomes(passed=1)


def test_arguments_of_the_call(pytester, run, report):
    pytester.makepyfile(
        """
        import models, torch
        def test_it(stability_run):
            cpu = torch.device("cpu")
            run = stability_run(models.plain, steps=3, batch_size=2, seq_len=5, seed=8, device=cpu)
            assert len(run.records) == 3
        """
    )
    run("--stackwise-report=out.json").assert_outcomes(passed=1)
    assert report()["stability"][0]["seq_len"] == 5


def test_sound_training_is_stable(pytester, run, report):
    pytester.makepyfile(
        """
        import models, pytest
        @pytest.mark.parametrize("factory", [models.plain, models.Plain(), models.rack, models.vectors])
        def test_it(stability_run, factory): assert stability_run(factory, steps=6).verdict == "stable"
        """
    )
    run("--stackwise-report=out.json").assert_outcomes(passed=4)
    assert [record["verdict"] for record in report()["stability"]] == ["stable"] * 4


def test_one_test_per_length(pytester, run, report):
    pytester.makepyfile(
        """
        import models, pytest
        @pytest.mark.seq_lengths(4, 16, 32)
        def test_it(stability_run, seq_len):
            run = stability_run(models.rack, steps=2)
            assert run.seq_len == seq_len
        @pytest.mark.seq_lengths(8)
        def test_only_the_length(seq_len): assert seq_len == 8
        """
    )
    result = run("-v", "--stackwise-report=out.json")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines([f"*::test_it[[]T{length}] PASSED*" for length in (4, 16, 32)])
    assert [record["seq_len"] for record in report()["stability"]] == [4, 16, 32]
    assert [record["test"].rpartition("::")[2] for record in report()["stability"]] == [
        "test_it[T4]",
        "test_it[T16]",
        "test_it[T32]",
    ]


def test_length_that_is_not_given_is_the_specs_own(pytester, run):
    pytester.makepyfile(
        """
        import models
        from stackwise import ModelSpec
        SPEC = ModelSpec.of(models.plain, seq_len=6)
        def test_it(stability_run, seq_len):
            assert seq_len is None
            assert stability_run(SPEC, steps=1).seq_len == 6
        """
    )
    run().assert_outcomes(passed=1)


def test_parametrization_of_the_users_own(pytester, run, report):
    pytester.makepyfile(
        """
        import models, pytest
        @pytest.mark.parametrize("seq_len", [4, 8])
        @pytest.mark.parametrize("factory", [models.plain, models.conv])
        def test_it(stability_run, factory, seq_len):
            assert stability_run(factory, steps=1).seq_len == seq_len
        @pytest.fixture
        def seq_len(): return 5
        def test_own_fixture(stability_run): assert stability_run(models.plain, steps=1).seq_len == 5
        """
    )
    run("--stackwise-report=out.json").assert_outcomes(passed=5)
    assert sorted(record["seq_len"] for record in report()["stability"]) == [4, 4, 5, 8, 8]


def test_two_parametrizations_of_the_length_are_refused(pytester, run):
    pytester.makepyfile(
        """
        import models, pytest
        @pytest.mark.seq_lengths(4)
        @pytest.mark.parametrize("seq_len", [8])
        def test_it(stability_run, seq_len): pass
        """
    )
    result = run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*duplicate parametrization of 'seq_len'*"])


def test_lengths_of_a_class_and_of_its_test(pytester, run):
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.seq_lengths(4, 8)
        class TestIt:
            def test_of_the_class(self, seq_len): assert seq_len in (4, 8)
            @pytest.mark.seq_lengths(16)
            def test_its_own(self, seq_len): assert seq_len == 16
        """
    )
    run().assert_outcomes(passed=3)


@pytest.mark.parametrize(
    ("marker", "text"),
    [
        ("nan_injection(step=16)", "its last step is 16; the run has 16 steps"),
        ("nan_injection(step=15, duration=2)", "its last step is 16; the run has 16 steps"),
        ("gradient_explosion(step=3)", "step: got 3; allowed: one that at least 4"),
        (
            "nan_injection(step=5, target='activation:attention')",
            "'activation:attention', which matches nothing",
        ),
        ("nan_injection(step=5, target='gradient:body*')", "'gradient:body[*]', which matches nothing"),
    ],
)
def test_fault_that_cannot_act_fails_the_test(pytester, run, marker, text):
    pytester.makepyfile(
        f"""
        import models, pytest
        @pytest.mark.{marker}
        def test_fault(stability_run): stability_run(models.plain)
        """
    )
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"E *ValueError: *{text}*"])


def test_length_beyond_the_model_fails_the_test(pytester, run):
    pytester.makepyfile(
        """
        import models, pytest
        from stackwise import ModelSpec
        SPEC = ModelSpec.of(models.plain, max_length=8)
        @pytest.mark.seq_lengths(8, 9)
        def test_it(stability_run): stability_run(SPEC, steps=1)
        """
    )
    result = run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E *seq_len: got 9; plain takes at most 8 positions"])


def test_seed_decides_the_run(pytester, run, report):
    pytester.makepyfile("import models\ndef test_it(stability_run): stability_run(models.rack, steps=3)")
    losses = []
    for number, seed in enumerate((3, 3, 4)):
        run(f"--stackwise-seed={seed}", f"--stackwise-report={number}.json").assert_outcomes(passed=1)
        losses.append([record["loss"] for record in report(f"{number}.json")["stability"][0]["records"]])
    assert losses[0] == losses[1] != losses[2]
    assert all(map(math.isfinite, losses[0]))


def test_runs_of_a_failing_test_are_reported(pytester, run, report):
    pytester.makepyfile(
        """
        import models, pytest
        @pytest.mark.nan_injection(step=2)
        def test_it(stability_run):
            assert stability_run(models.plain, steps=4).verdict == "stable"
        """
    )
    run("--stackwise-report=out.json").assert_outcomes(failed=1)
    assert [record["verdict"] for record in report()["stability"]] == ["caught"]
    assert report()["verdict"] == "FAIL"


def test_run_that_a_fixture_makes_is_reported(pytester, run, report):
    pytester.makepyfile(
        """
        import models, pytest
        @pytest.fixture
        def trained(stability_run): return stability_run(models.plain, steps=2)
        def test_it(trained): assert trained.verdict == "stable"
        """
    )
    run("--stackwise-report=out.json").assert_outcomes(passed=1)
    assert len(report()["stability"]) == 1
