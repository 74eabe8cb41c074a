"""Train the classic MNIST network on the GPUs of one node with nn.DataParallel: one process drives all.

Try: python mnist_multigpu.py --epochs 2
"""

import torch
import torch.nn.functional as F
from torch import nn

from manygpus import (
    Net,
    Run,
    augmentation,
    build_optimizer,
    entrypoint,
    eval_loader,
    evaluate,
    init_single_process,
    load_dataset,
    parse_options,
    resolve_precision,
    take_all_gpus,
    train_loader,
    tune_process,
)


@entrypoint
def main() -> None:
    opts = parse_options(__doc__)
    dist_env = init_single_process(use_gpu=not opts.no_cuda, debug_dir=opts.debug_dir)
    tune_process(dist_env)
    gpus = torch.cuda.device_count() if dist_env.device.type == "cuda" else 0
    opts = opts.resolve_batch_size(gpus, "GPUs")
    opts = resolve_precision(opts, dist_env.device)
    torch.manual_seed(opts.seed)
    take_all_gpus(opts.seed)  # so that each GPU drops different neurons

    # By default all images go to the device once and stay there.
    train_set, test_set = load_dataset(opts.dataset, opts.data_dir)
    train_batches = train_loader(train_set, opts, dist_env, augmentation(opts))
    test_batches = eval_loader(test_set, opts, dist_env)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(opts.width).to(dist_env.device, memory_format=torch.channels_last)
    if gpus > 1:
        # In every step, DataParallel copies the weights to each GPU, gives each a slice of the batch, and
        # adds up the gradients on the first GPU.
        model = nn.DataParallel(model)
        # It runs the replicas in threads, where autocast would compute in float16 without this hook.
        model.module.register_forward_pre_hook(lambda *_: torch.set_autocast_dtype("cuda", torch.bfloat16))
    else:
        print(f"DataParallel needs at least 2 GPUs and finds {gpus}: this run is the plain model.")
    autocast = torch.autocast(dist_env.device.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16")
    optimizer, lr_scheduler = build_optimizer(opts, model, steps_per_epoch=len(train_batches))

    run = Run("dp", opts, dist_env, train_set, model, optimizer, lr_scheduler, devices=max(gpus, 1))
    run.resume()  # continues where an earlier run stopped
    for epoch in run.epochs():
        model.train()
        for images, labels in run.steps(epoch, train_batches):
            optimizer.zero_grad()
            with autocast:
                loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            run.log(loss=loss)
        run.end_of_epoch(epoch, evaluate(model, test_batches, F.nll_loss, autocast))
    run.finish()


if __name__ == "__main__":
    main()
