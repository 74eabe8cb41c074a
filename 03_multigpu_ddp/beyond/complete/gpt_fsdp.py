"""Train a small GPT on generated text with fully_shard: each rank has one shard of the network (FSDP).

Try: torchrun --standalone --nproc-per-node=2 gpt_fsdp.py
"""

import gpt_data
import gpt_metrics
import torch
from gpt_model import GPTOptions, build_model, build_optimizer, compile_blocks, loss_of, run_name
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from manygpus import (
    BestWeights,
    Run,
    Sharded,
    destroy_distributed,
    entrypoint,
    errors,
    evaluate,
    init_distributed,
    parse_options,
    resolve_precision,
    tune_process,
)
from manygpus.checkpoint.sharded import check_pytorch


@entrypoint
def main() -> None:
    check_pytorch()
    opts = parse_options(__doc__, GPTOptions)
    dist_env = init_distributed(
        use_gpu=not opts.no_cuda, timeout_seconds=opts.timeout, debug_dir=opts.debug_dir
    )
    tune_process(dist_env)
    opts = opts.resolve_batch_size(dist_env.world_size)
    opts = resolve_precision(opts, dist_env.device)
    torch.manual_seed(opts.seed)

    train_text, test_text = gpt_data.texts(opts)
    train_batches = gpt_data.training(train_text, opts, dist_env)
    test_batches = gpt_data.validating(test_text, opts, dist_env)

    with torch.device("meta"):  # names and shapes without memory: no GPU ever holds the whole network
        model = build_model(opts)
    flops_per_window = opts.context * gpt_metrics.flops_per_token(model)
    if opts.compile:
        compile_blocks(model)
    # The shards stay in float32. In bf16 a block computes in bf16, and gradients are summed in float32.
    compute_dtype = torch.bfloat16 if opts.precision == "bf16" else torch.float32
    policy = fsdp.MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh(dist_env.device.type, (dist_env.world_size,))
    for block in model.blocks:  # the ranks gather each block for its own turn only
        fsdp.fully_shard(block, mesh=mesh, mp_policy=policy)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)  # what is outside of the blocks
    # Rank 0 makes the first weights, in the memory of the CPU, and each rank takes its shard of them.
    model.to_empty(device=dist_env.device)
    whole = build_model(opts).state_dict() if dist_env.rank == 0 else {}
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=from_rank_0)
    del whole
    optimizer, lr_scheduler = build_optimizer(opts, model, opts.epochs * len(train_batches))

    sharded = Sharded(model, optimizer)
    best_file = opts.checkpoint_dir / "best.pt" if opts.checkpoint_dir else None
    best = BestWeights(model, sharded, best_file)
    run = Run(
        run_name("gpt-fsdp", opts),
        opts,
        dist_env,
        train_text,
        model,
        optimizer,
        lr_scheduler,
        extra_state={"best": best},
        sharded=sharded,
        unit="tokens",
        per_sample=opts.context,
    )
    train_loss = torch.compile(loss_of) if opts.compile else loss_of
    run.resume()  # continues where an earlier run stopped
    for epoch in run.epochs():
        model.train()
        for tokens, targets in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            loss = train_loss(model(tokens), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            run.log(loss=loss)
        tested = evaluate(model, test_batches, loss_of)
        if opts.checkpoint_dir:
            best.keep(epoch, tested.loss)
        metrics = gpt_metrics.of_epoch(run.trained, opts, dist_env, flops_per_window, optimizer)
        run.end_of_epoch(epoch, tested, metrics)
        if dist_env.rank == 0:
            errors.print_line(gpt_metrics.in_one_line(metrics))
    run.finish()
    destroy_distributed()


if __name__ == "__main__":
    main()
