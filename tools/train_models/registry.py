"""The members of the model zoo by name."""

from tools.train_models.dllm import Dllm
from tools.train_models.dsa import Dsa
from tools.train_models.member import Member
from tools.train_models.mla import Mla
from tools.train_models.moe import Moe
from tools.train_models.ngram_emb import NgramEmb
from tools.train_models.vl import Vl

MEMBERS: dict[str, type[Member]] = {
    "moe": Moe,
    "mla": Mla,
    "dllm": Dllm,
    "vl": Vl,
    "ngram_emb": NgramEmb,
    "dsa": Dsa,  # starts from mla
}
