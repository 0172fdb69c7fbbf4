#!/usr/bin/env bash
# GRPO with verl 0.9.1 and the rollout of this package: `rollout.name=tlt` is the line that changes.
#
#   pip install -e '.[verl]'
#   MODEL=/models/my-qwen3 DATA=/data/gsm8k examples/verl_grpo.sh trainer.n_gpus_per_node=8
#
# DATA has train.parquet and test.parquet of verl's examples/data_preprocess/gsm8k.py. Each GPU has
# one engine. Further words replace the settings below.
set -euo pipefail
: "${MODEL:?folder of a model}" "${DATA:?folder with train.parquet and test.parquet}"

python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$DATA/train.parquet" \
  data.val_files="$DATA/test.parquet" \
  data.train_batch_size=32 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.model.enable_gradient_checkpointing=False \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.actor.use_dynamic_bsz=False \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.rollout.name=tlt \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.calculate_log_probs=True \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
  trainer.logger=console \
  trainer.n_gpus_per_node=1 \
  trainer.nnodes=1 \
  trainer.total_training_steps=20 \
  trainer.val_before_train=False \
  trainer.test_freq=-1 \
  trainer.save_freq=-1 \
  "$@"
