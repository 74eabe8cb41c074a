"""Train a small GPT on generated text with DistributedDataParallel: each rank has the whole network.

Try: torchrun --standalone --nproc-per-node=2 gpt.py
"""

import gpt_data
import gpt_metrics
import torch
from gpt_model import GPTOptions, build_model, build_optimizer, compile_blocks, loss_of, run_name
from torch import nn

from manygpus import (
    BestWeights,
    Run,
    destroy_distributed,
    entrypoint,
    errors,
    evaluate,
    init_distributed,
    parse_options,
    resolve_precision,
    tune_process,
)


@entrypoint
def main() -> None:
    opts = parse_options(__doc__, GPTOptions)
    dist_env = init_distributed(
        use_gpu=not opts.no_cuda, timeout_seconds=opts.timeout, debug_dir=opts.debug_dir
    )
    tune_process(dist_env)
    opts = opts.resolve_batch_size(dist_env.world_size)
    opts = resolve_precision(opts, dist_env.device)
    torch.manual_seed(opts.seed)  # the same weights on every rank

    train_text, test_text = gpt_data.texts(opts)
    train_batches = gpt_data.training(train_text, opts, dist_env)
    test_batches = gpt_data.validating(test_text, opts, dist_env)

    model = build_model(opts).to(dist_env.device)
    flops_per_window = opts.context * gpt_metrics.flops_per_token(model)
    if opts.compile:
        compile_blocks(model)
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    autocast = torch.autocast(dist_env.device.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16")
    optimizer, lr_scheduler = build_optimizer(opts, model, opts.epochs * len(train_batches))

    best_file = opts.checkpoint_dir / "best.pt" if opts.checkpoint_dir else None
    best = BestWeights(model, path=best_file)
    run = Run(
        run_name("gpt-ddp", opts),
        opts,
        dist_env,
        train_text,
        model,
        optimizer,
        lr_scheduler,
        extra_state={"best": best},
        unit="tokens",
        per_sample=opts.context,
    )
    train_loss = torch.compile(loss_of) if opts.compile else loss_of
    run.resume()  # continues where an earlier run stopped
    for epoch in run.epochs():
        model.train()
        for tokens, targets in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            with autocast:
                loss = train_loss(model(tokens), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            run.log(loss=loss)
        tested = evaluate(model, test_batches, loss_of, autocast)
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
