"""Train the classic MNIST network on one GPU (or on the CPU, if there is none).

Try: python mnist_singlegpu.py --epochs 2
"""

import torch
import torch.nn.functional as F

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
    train_loader,
    tune_process,
)


@entrypoint
def main() -> None:
    opts = parse_options(__doc__)
    dist_env = init_single_process(use_gpu=not opts.no_cuda, debug_dir=opts.debug_dir)
    tune_process(dist_env)
    opts = opts.resolve_batch_size(1)
    opts = resolve_precision(opts, dist_env.device)
    torch.manual_seed(opts.seed)

    # By default all images go to the device once and stay there.
    train_set, test_set = load_dataset(opts.dataset, opts.data_dir)
    train_batches = train_loader(train_set, opts, dist_env, augmentation(opts))
    test_batches = eval_loader(test_set, opts, dist_env)

    # channels_last: the memory layout in which convolutions are fastest.
    model = Net(opts.width).to(dist_env.device, memory_format=torch.channels_last)
    autocast = torch.autocast(dist_env.device.type, dtype=torch.bfloat16, enabled=opts.precision == "bf16")
    optimizer, lr_scheduler = build_optimizer(opts, model, steps_per_epoch=len(train_batches))

    run = Run("single", opts, dist_env, train_set, model, optimizer, lr_scheduler)
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
