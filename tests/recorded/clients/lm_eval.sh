# A task of one's own, by both of OpenAI's routes.
set -e
mkdir tasks
echo '{"question": "What is the capital of France?", "answer": "Paris"}' > tasks/data.jsonl
cat > tasks/capital.yaml <<'YAML'
task: capital
dataset_path: json
dataset_kwargs:
  data_files:
    test: tasks/data.jsonl
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\n\n"]
  max_gen_toks: 32
metric_list:
  - metric: exact_match
YAML
options="model=fake,tokenizer_backend=None,tokenized_requests=False,num_concurrent=1,max_retries=1"
lm_eval --model local-chat-completions --tasks capital --include_path tasks --apply_chat_template \
  --model_args "$options,base_url=$BASE_URL/v1/chat/completions"
lm_eval --model local-completions --tasks capital --include_path tasks \
  --model_args "$options,base_url=$BASE_URL/v1/completions"
