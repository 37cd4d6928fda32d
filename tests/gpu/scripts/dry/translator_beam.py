"""Translation with recurrent layers: an encoder in both directions, attention by hand, teacher forcing, beam search."""

import random

import torch
import torch.nn.functional as F
from torch import nn

random.seed(2)
torch.manual_seed(2)
PAD, BEGIN, END, WORDS = 0, 1, 2, 6000


class Encoder(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=PAD)
        self.rnn = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.bridge = nn.Linear(2 * width, width)

    def forward(self, ids, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return torch.tanh(self.bridge(out))


class Decoder(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=PAD)
        self.cell = nn.LSTMCell(2 * width, width)
        self.query = nn.Linear(width, width, bias=False)
        self.out = nn.Sequential(nn.Linear(2 * width, width), nn.Tanh(), nn.Linear(width, WORDS))

    def forward(self, word, state, memory, mask):
        scores = torch.bmm(memory, self.query(state[0]).unsqueeze(2)).squeeze(2)
        weights = F.softmax(scores.masked_fill(mask, float("-inf")), -1)
        context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
        hidden, cell = self.cell(torch.cat([self.embed(word), context], 1), state)
        return self.out(torch.cat([hidden, context], 1)), (hidden, cell)


encoder, decoder = Encoder().cuda(), Decoder().cuda()
params = [*encoder.parameters(), *decoder.parameters()]
optimizer = torch.optim.Adam(params, lr=3e-4, betas=(0.9, 0.98))


def batch(size=32):
    lengths = torch.tensor([random.randint(10, 40) for _ in range(size)])
    source = torch.randint(3, WORDS, (size, int(lengths.max())))
    source[torch.arange(source.shape[1])[None] >= lengths[:, None]] = PAD
    target = torch.randint(3, WORDS, (size, 30))
    target[:, 0], target[:, -1] = BEGIN, END
    return source.cuda(), lengths, target.cuda()


for step in range(4):
    source, lengths, target = batch()
    memory = encoder(source, lengths)
    state = memory[:, 0], torch.zeros_like(memory[:, 0])
    loss, word = 0.0, target[:, 0]
    for t in range(1, target.shape[1]):
        logits, state = decoder(word, state, memory, source == PAD)
        loss = loss + F.cross_entropy(logits, target[:, t], ignore_index=PAD)
        word = target[:, t] if random.random() < 0.7 else logits.argmax(-1)
    loss = loss / target.shape[1]
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    print(step, round(loss.item(), 3))

encoder.eval()
decoder.eval()
with torch.no_grad():
    source, lengths, _ = batch(1)
    beams, width = 5, 256
    memory = encoder(source, lengths).expand(beams, -1, -1)
    state = memory[:, 0].contiguous(), torch.zeros(beams, width, device="cuda")
    words = torch.full((beams, 1), BEGIN, device="cuda")
    scores = torch.tensor([0.0] + [float("-inf")] * (beams - 1), device="cuda")
    for _ in range(50):
        logits, state = decoder(words[:, -1], state, memory, (source == PAD).expand(beams, -1))
        ended = words[:, -1] == END
        chances = F.log_softmax(logits, -1).masked_fill(ended[:, None], float("-inf"))
        chances[:, END] = chances[:, END].masked_fill(ended, 0.0)
        scores, places = (scores[:, None] + chances).flatten().topk(beams)
        rows, word = places // WORDS, places % WORDS
        words = torch.cat([words[rows], word[:, None]], 1)
        state = tuple(each[rows] for each in state)
        if bool((words[:, -1] == END).all()):
            break
print(words.shape[0], "texts")
