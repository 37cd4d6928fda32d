import torch
from transformers import Adafactor, BartConfig, BartForConditionalGeneration

cfg = BartConfig(
    d_model=256,
    encoder_layers=3,
    decoder_layers=3,
    encoder_ffn_dim=1024,
    decoder_ffn_dim=1024,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    vocab_size=8000,
)
m = BartForConditionalGeneration(cfg).cuda()
opt = Adafactor(m.parameters(), lr=None, scale_parameter=True, relative_step=True, warmup_init=True)
m.gradient_checkpointing_enable()
best = -1
for epoch in range(2):
    m.train()
    for i in range(3):
        src, tgt = torch.randint(4, 8000, (8, 100 + 20 * i)).cuda(), torch.randint(4, 8000, (8, 40)).cuda()
        lab = tgt.clone()
        lab[:, 30:] = -100
        loss = m(input_ids=src, labels=lab).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
    m.eval()
    hits = 0
    g = m.generate(src, num_beams=4, max_new_tokens=20, early_stopping=True, no_repeat_ngram_size=3)
    for a, b in zip(g.tolist(), tgt.tolist()):
        hits += len(set(a) & set(b))
    h = m.generate(src, do_sample=True, top_p=0.9, max_new_tokens=15)
    if hits > best:
        best = hits
        torch.save(m.state_dict(), "/tmp/bart.pt")
    print(epoch, loss.item(), g.shape, h.shape, hits)
