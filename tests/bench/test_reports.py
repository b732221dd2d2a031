"""Reports: forms of a case, and the cases of the stored results."""

from types import SimpleNamespace

from bench.reports import first_results, forms, modules


def test_one_declaration_gives_both_declared_forms():
    case = SimpleNamespace(
        buggy=lambda: "bug", healthy=lambda: "twin", declared=lambda make: f"spec of a {make()}"
    )
    made = {form: make() for form, make in forms(case).items()}
    assert made == {
        "buggy": "bug",
        "healthy": "twin",
        "buggy_declared": "spec of a bug",
        "healthy_declared": "spec of a twin",
    }


def test_declared_forms_may_state_different_facts():
    case = SimpleNamespace(buggy=int, healthy=int, buggy_declared=lambda: 1, healthy_declared=lambda: 2)
    assert {form: make() for form, make in forms(case).items()} == {
        "buggy": 0,
        "healthy": 0,
        "buggy_declared": 1,
        "healthy_declared": 2,
    }


def test_each_form_of_the_first_results_exists():
    existing = {f"{name}:{form}" for name, module in modules().items() for form in forms(module)}
    assert existing >= first_results().keys()
