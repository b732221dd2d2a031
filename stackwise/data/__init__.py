"""Data: text, token shards and synthetic tasks, in an order that depends on seed and epoch."""

from stackwise.data.batches import Batches
from stackwise.data.create import create_data
from stackwise.data.prefetch import Prefetched
from stackwise.data.shards import TokenShards, write_shards
from stackwise.data.text import documentation_text, standard_library_text
from stackwise.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, create_tokenizer
from stackwise.data.windows import TokenWindows

__all__ = [
    "Batches",
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "Prefetched",
    "TokenShards",
    "TokenWindows",
    "create_data",
    "create_tokenizer",
    "documentation_text",
    "standard_library_text",
    "write_shards",
]
