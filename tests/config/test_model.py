"""Settings of the model: heads, attention types and positions that fit together, and the Blocks of a Rack."""

import pytest

from stackwise.config import BlockConfig, ModelConfig, StackWiseConfig
from tests.config.keys import assert_refused, problems, same_values

MHA = {"attention_type": "mha", "n_kv_heads": None}
MQA = {"attention_type": "mqa", "n_kv_heads": None}
MLA = {"attention_type": "mla", "n_kv_heads": None}
KERNEL = {"attention_type": "kernel"}
LLAMA3 = {"factor": 2.0, "rope_type": "llama3"}
HIGH = {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}
LOW = {"rope_scaling": LLAMA3 | {"low_freq_factor": 5.0}}
# Keys of a Block of width 512 with 8 query heads and 2 key heads, the key refused, its value and the rule.
REFUSED = [
    ({"d_model": 64, "n_heads": 7}, "n_heads", 7, "must divide d_model=64"),
    ({"d_model": 4}, "n_heads", 8, "must divide d_model=4"),
    ({"n_kv_heads": 3}, "n_kv_heads", 3, "must divide n_heads=8"),
    ({"n_kv_heads": 16}, "n_kv_heads", 16, "must divide n_heads=8"),
    (MHA | {"n_kv_heads": 4}, "attention_type", "mha", "needs n_kv_heads=null or 8 (n_kv_heads=4)"),
    ({"n_kv_heads": None}, "attention_type", "gqa", "needs n_kv_heads; set n_kv_heads or use 'mha'"),
    (MQA | {"n_kv_heads": 2}, "attention_type", "mqa", "needs n_kv_heads=null or 1 (n_kv_heads=2)"),
    (MLA | {"n_kv_heads": 8}, "attention_type", "mla", "needs n_kv_heads=null (n_kv_heads=8)"),
    (MLA | {"head_dim": 64}, "attention_type", "mla", "needs head_dim=null"),
    (MLA | {"qk_norm": "head"}, "qk_norm", "head", "attention_type='mla' has none"),
    (MLA | {"qkv_bias": True}, "qkv_bias", True, "attention_type='mla' has none"),
    (MLA | {"latent": {"qk_rope_head_dim": 3}}, "latent.qk_rope_head_dim", 3, "a multiple of 2"),
    (
        MQA | {"latent": {}},
        "latent",
        {},
        "only with attention_type='mla'; now attention_type='mqa'",
    ),
    (
        KERNEL | {"latent": {}},
        "latent",
        {},
        "only with attention_type='mla'; now attention_type='kernel'",
    ),
    ({"latent": {}}, "latent", {}, "only with attention_type='mla'; now attention_type='gqa'"),
    (
        MQA | {"kernel": {}},
        "kernel",
        {},
        "only with attention_type='kernel'; now attention_type='mqa'",
    ),
    (
        MLA | {"kernel": {}},
        "kernel",
        {},
        "only with attention_type='kernel'; now attention_type='mla'",
    ),
    (KERNEL | {"softcap": 3.0}, "softcap", 3.0, "attention_type='kernel' has none"),
    (
        KERNEL | {"sliding_window": 5},
        "sliding_window",
        5,
        "kernel attention sees the whole past",
    ),
    *(
        (KERNEL | {"kernel": {"feature_map": kind, "n_features": 7}}, "kernel.n_features", 7, "must be even")
        for kind in ("gaussian", "laplacian")
    ),
    ({"head_dim": 5}, "use_rope", True, "needs an even head size; it is 5"),
    ({"d_model": 24}, "use_rope", True, "needs an even head size; it is 3"),
    ({"use_rope": False, "rope_scaling": LLAMA3}, "rope_scaling", LLAMA3, "needs use_rope=true"),
    (HIGH, "rope_scaling.high_freq_factor", 1.0, "must exceed low_freq_factor=1.0"),
    (LOW, "rope_scaling.high_freq_factor", 4.0, "must exceed low_freq_factor=5.0"),
    ({"initialization": "mup"}, "mup_base_width", None, "'mup' needs the d_model of the base"),
    (
        {"mup_base_width": 64},
        "mup_base_width",
        64,
        "only with initialization='mup'; now initialization='normal'",
    ),
]
ACCEPTED = [
    {"d_model": 64, "n_heads": 64, "n_kv_heads": 64, "use_rope": False},
    MHA,
    MHA | {"n_kv_heads": 8},
    {"n_kv_heads": 8},
    {"n_kv_heads": 1},
    MQA,
    MQA | {"n_kv_heads": 1},
    MQA | {"head_dim": 64},
    MLA | {"softcap": 1.0, "sliding_window": 3},
    MLA | {"latent": {"q_lora_rank": 7, "v_head_dim": 5}},
    MLA | {"d_model": 25},
    KERNEL | {"qk_norm": "head", "qkv_bias": True, "n_kv_heads": None},
    KERNEL | {"kernel": {"feature_map": "favor", "n_features": 7}},
    KERNEL | {"kernel": {"feature_map": "gaussian", "n_features": 6}},
    {"qk_norm": "width", "softcap": 1.0, "qkv_bias": True},
    {"d_model": 7, "head_dim": 4, "n_heads": 6, "n_kv_heads": 3},
    {"head_dim": 5, "use_rope": False},
    {"d_model": 24, "use_rope": False},
    {"rope_scaling": LLAMA3 | {"low_freq_factor": 3.9}},
    {"rope_scaling": {"rope_type": "linear", "factor": 1}},
    {"initialization": "mup", "mup_base_width": 64},
]
BLOCK = {"d_model": 512, "d_ff": 64, "n_heads": 8, "n_kv_heads": 2, "attention_type": "gqa"}


@pytest.mark.parametrize("keys, key, value, rule", REFUSED)
class TestKeysThatDoNotFit:
    def test_model_refuses_them(self, keys, key, value, rule):
        assert_refused(problems(ModelConfig, keys), key, value, [rule])

    def test_block_refuses_them(self, keys, key, value, rule):
        assert_refused(problems(BlockConfig, BLOCK | keys), key, value, [rule])


@pytest.mark.parametrize("keys", ACCEPTED)
def test_keys_that_fit_are_accepted(keys):
    for found in (ModelConfig.from_dict(keys), BlockConfig.from_dict(BLOCK | keys)):
        assert same_values(keys, found.to_dict())


@pytest.mark.parametrize("key", ["d_model", "d_ff", "n_heads"])
def test_block_needs_its_sizes(key):
    sizes = {name: value for name, value in BLOCK.items() if name != key}
    assert f"{key}: required key is missing" in problems(BlockConfig, sizes)


@pytest.mark.parametrize("key", ["rope_type", "factor"])
def test_rope_scaling_needs_its_type_and_factor(key):
    scaling = {name: value for name, value in LLAMA3.items() if name != key}
    lines = problems(ModelConfig, {"rope_scaling": scaling})
    assert lines == [f"rope_scaling.{key}: required key is missing"]


class TestSlidingWindow:
    @pytest.mark.parametrize(
        "windows, key, value, words",
        [
            ([4, 0], "sliding_window.1", 0, ["1"]),
            (["4"], "sliding_window.0", "4", ["integer"]),
            ([[4]], "sliding_window.0", [4], ["integer"]),
            ([True, None], "sliding_window.0", True, ["integer"]),
        ],
    )
    def test_window_in_a_list_is_refused(self, windows, key, value, words):
        assert_refused(problems(ModelConfig, {"sliding_window": windows}), key, value, words)

    def test_kernel_attention_has_no_window(self):
        keys = KERNEL | {"sliding_window": [None, 4]}
        words = ["kernel attention sees the whole past", "null"]
        assert_refused(problems(ModelConfig, keys), "sliding_window", [None, 4], words)
        assert ModelConfig.from_dict(KERNEL | {"sliding_window": [None]}).sliding_window == [None]

    def test_block_has_one_window(self):
        keys = BLOCK | {"sliding_window": [4]}
        assert_refused(problems(BlockConfig, keys), "sliding_window", [4], ["integer"])


class TestBlocks:
    def test_windows_are_repeated_over_the_blocks(self):
        sizes = {"n_stacks": 2, "blocks_per_stack": 3}
        model = ModelConfig(sliding_window=[1, 2, None, 4], architecture=sizes)
        windows = [[block.sliding_window for block in stack] for stack in model.blocks()]
        assert windows == [[1, 2, None], [4, 1, 2]]

    @pytest.mark.parametrize("keys", ACCEPTED)
    def test_blocks_have_the_keys_of_the_model(self, keys):
        model = ModelConfig.from_dict(keys | {"sliding_window": None, "architecture": {"n_stacks": 3}})
        shared = model.to_dict().items()
        assert [len(stack) for stack in model.blocks()] == [4, 4, 4]
        for block in (block for stack in model.blocks() for block in stack):
            assert block.to_dict() == {key: value for key, value in shared if key in BlockConfig.model_fields}

    def test_rack_has_at_most_ten_thousand_blocks(self):
        architecture = {"n_stacks": 1000, "blocks_per_stack": 11}
        lines = problems(StackWiseConfig, {"model": {"architecture": architecture}})
        rule = ["at most 10, for 10,000 Blocks"]
        assert_refused(lines, "model.architecture.blocks_per_stack", 11, rule)
        ModelConfig(architecture=architecture | {"blocks_per_stack": 10})
