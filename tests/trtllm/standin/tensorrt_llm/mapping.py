class Mapping:
    def __init__(self, world_size=1, rank=0, gpus_per_node=8, *, cp_size=1, cp_config=None,
                 tp_size=1, pp_size=1, moe_cluster_size=-1, moe_tp_size=-1, moe_ep_size=-1,
                 attn_tp_size=-1, attn_cp_size=-1, auto_parallel=False,
                 enable_attention_dp=False):  # fmt: skip
        assert world_size == cp_size * tp_size * pp_size
        self.world_size, self.rank, self.tp_size, self.pp_size = world_size, rank, tp_size, pp_size

    @property
    def tp_rank(self):
        return self.rank % self.tp_size
