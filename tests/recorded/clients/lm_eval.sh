# lm-eval: a tiny task, by chats and by completions (texts and log-probabilities).
set -e
mkdir -p tasks
export HF_HOME=$HOME/huggingface HF_DATASETS_OFFLINE=1 HF_HUB_OFFLINE=1
echo '{"question": "What is the capital of France?", "answer": "Paris"}' > tasks/data.jsonl
for kind in generate_until multiple_choice; do
    cat > tasks/$kind.yaml <<END
task: tiny_$kind
dataset_path: json
dataset_kwargs: {data_files: {test: $PWD/tasks/data.jsonl}}
test_split: test
output_type: $kind
doc_to_text: "Question: {{question}} Answer:"
END
done
cat >> tasks/generate_until.yaml <<END
doc_to_target: answer
generation_kwargs: {until: ["\n\n"], max_gen_toks: 16}
metric_list: [{metric: exact_match}]
END
cat >> tasks/multiple_choice.yaml <<END
doc_to_target: 0
doc_to_choice: ["Paris", "Rome"]
metric_list: [{metric: acc}]
END
lm_eval --model local-chat-completions --apply_chat_template --include_path tasks \
    --tasks tiny_generate_until \
    --model_args "model=fake,base_url=$BASE_URL/v1/chat/completions,max_length=2048"
lm_eval --model local-completions --include_path tasks --tasks tiny_generate_until,tiny_multiple_choice \
    --model_args "model=fake,base_url=$BASE_URL/v1/completions,tokenizer=$TOKENIZER,max_length=2048"
