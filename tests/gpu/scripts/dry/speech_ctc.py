"""Speech: convolutions, a Transformer, CTC, lengths that vary."""

import torch
import torch.nn as nn

torch.manual_seed(1)


class Net(nn.Module):
    def __init__(s):
        super().__init__()
        s.c = nn.Sequential(
            nn.Conv1d(80, 256, 11, stride=2, padding=5),
            nn.BatchNorm1d(256),
            nn.GELU(),
            nn.Conv1d(256, 256, 11, padding=5),
            nn.GELU(),
        )
        s.t = nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True), 4)
        s.o = nn.Linear(256, 32)

    def forward(s, x, mask=None):
        return s.o(s.t(s.c(x).transpose(1, 2), src_key_padding_mask=mask)).log_softmax(-1)


net = Net().cuda()
opt = torch.optim.AdamW(net.parameters(), 0.0003)
ctc = nn.CTCLoss(zero_infinity=True)
for step in range(6):
    T = [300, 400, 520, 300, 610, 400][step]
    feats = torch.randn(16, 80, T).cuda()
    lens = torch.randint(T // 2, T + 1, (16,)) // 2
    n = (T + 1) // 2
    mask = torch.arange(n)[None] >= lens[:, None]
    tgt = torch.randint(1, 32, (16, 40))
    tl = torch.randint(10, 41, (16,))
    lp = net(feats, mask.cuda())
    loss = ctc(lp.transpose(0, 1), tgt.cuda(), lens.clamp(max=n).cuda(), tl.cuda())
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, loss.item())
    if torch.isnan(loss):
        raise SystemExit("nan")
