"""Secrets in the forms of logs and command lines, and harmless look-alikes; all made up.

Values are drawn anew from a seed, so that no service takes one for a leaked key.
"""

from __future__ import annotations

import base64
import json
import random
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_MIXED = string.ascii_letters + string.digits
_HEX = "0123456789abcdef"


@dataclass(frozen=True)
class Planted:
    """A text, and the secret in it."""

    kind: str
    text: str
    secret: str


def planted(seed: int = 1) -> list[Planted]:  # noqa: C901 - a table, and what draws its values
    """Draw 150 secrets of 40 kinds and more, each in a text of its own."""
    draw = random.Random(seed)

    def word(length: int, letters: str = _MIXED) -> str:
        return "".join(draw.choice(letters) for _ in range(length))

    def aws() -> str:
        while True:
            made = word(40, _MIXED + "/+")
            if "/" in made[1:-1] and "+" in made[1:-1] and any(c.isdigit() for c in made):
                return made

    def mixed(length: int) -> str:
        while True:
            made = word(length)
            if sum(c.isdigit() for c in made) > 1 and any(c.isupper() for c in made) and any(c.islower() for c in made):
                return made

    def packed(value: object) -> str:
        return base64.b64encode(json.dumps(value).encode()).decode()

    def human() -> str:
        return draw.choice(
            ("swordfish", "Tr0ub4dor&3", "correct-horse", "hunter22", "Winter2026!", "pa55w0rd!", "letmein9")
        )

    makers: dict[str, tuple[Callable[[], str], tuple[str, ...]]] = {
        "AWS secret alone": (aws, ("{}", "loaded {} from the instance profile", "[rank3] botocore: '{}'", "keys: AKIAZZZZ {}")),
        "AWS secret": (aws, ("aws_secret_access_key = {}", "AWS Secret Access Key [None]: {}", "aws configure set aws_secret_access_key {}", "SecretAccessKey: {}")),
        "AWS key id": (lambda: "AKIA" + word(16, string.ascii_uppercase + "234567"), ("using {} in us-east-1", "Credential={}/20261125/us-east-1/s3/aws4_request")),
        "AWS session": (lambda: "IQoJb3JpZ2luX2Vj" + word(180, _MIXED + "/+") + "==", ("X-Amz-Security-Token={}", "session {}")),
        "Slack webhook": (lambda: f"T0{word(8, string.ascii_uppercase)}/B0{word(8, string.ascii_uppercase)}/{mixed(24)}", ("https://hooks.slack.com/services/{}", "curl -X POST --data @m.json https://hooks.slack.com/services/{}")),
        "Slack token": (lambda: f"xoxb-{word(11, string.digits)}-{word(12, string.digits)}-{mixed(24)}", ("slack client {}", "SlackApiError: invalid_auth ({})")),
        "Discord webhook": (lambda: f"{word(18, string.digits)}/{mixed(68)}", ("https://discord.com/api/webhooks/{}", "notify=https://discordapp.com/api/webhooks/{}")),
        "Teams webhook": (lambda: f"{word(8, _HEX)}-{word(12, _HEX)}@{word(12, _HEX)}/IncomingWebhook/{word(32, _HEX)}", ("https://corp.webhook.office.com/webhookb2/{}",)),
        "Telegram": (lambda: f"{word(10, string.digits)}:AA{word(33, _MIXED + '_-')}", ("https://api.telegram.org/bot{}/sendMessage", "bot {} started", "Telegram: {}")),
        "Azure storage": (lambda: base64.b64encode(draw.randbytes(64)).decode(), ("DefaultEndpointsProtocol=https;AccountName=ckpt;AccountKey={};EndpointSuffix=core.windows.net", "azcopy: AccountKey={}", "storage key {}", "Endpoint=sb://q.servicebus.windows.net/;SharedAccessKeyName=root;SharedAccessKey={}")),
        "Azure SAS": (lambda: word(41, _MIXED) + "%3D", ("https://ckpt.blob.core.windows.net/run7?sv=2024-11-04&se=2026-12-01&sr=c&sp=rl&sig={}", "sas: ?sig={}&se=2026")),
        "Azure client": (lambda: f"{word(3)}8Q~{word(34, _MIXED)}", ("az login --service-principal -u app -p {}", "AZURE_CLIENT_SECRET={}", "client {}")),
        "curl -u": (human, ("curl -u bob:{} https://mirror.corp.example/w.tar", "+ curl -sS --user 'bob:{}' https://x.example", "curl -fsSLubob:{} https://x.example", "wget --user=bob --password={} https://x.example")),
        "mysql -p": (human, ("mysql -h db7 -u train -p{} metrics", "mysqldump -p'{}' --all-databases", "mariadb --password={} -e 'select 1'")),
        "sshpass": (human, ("sshpass -p {} ssh node7 nvidia-smi", "sshpass -p'{}' rsync -a x y:", "SSHPASS={} sshpass -e ssh n7")),
        "PW ending": (human, ("PW={}", "export DBPW={}", "MLFLOW_PW='{}'", "declare -x PASS=\"{}\"", "SMTP_PASS={}", "DBPASS={}", "REDIS_PWD={}")),
        "Vault": (lambda: "hvs." + word(24, _MIXED), ("vault: {}", "export VAULT_TOKEN={}", "X-Vault-Token: {}")),
        "Vault old": (lambda: "s." + word(24, _MIXED), ("VAULT_TOKEN={}", "vault login token={}")),
        "Google refresh": (lambda: "1//0" + word(60, _MIXED + "_-"), ("{}", '"refresh_token": "{}"', "gcloud: cached {}")),
        "Google access": (lambda: "ya29." + word(80, _MIXED + "_-"), ("{}", "Authorization: Bearer {}")),
        "Google key": (lambda: "AIza" + word(35, _MIXED + "_-"), ("https://maps.googleapis.com/x?key={}", "key {}")),
        "age": (lambda: "AGE-SECRET-KEY-1" + word(58, "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L"), ("{}", "# sops: {}")),
        "netrc": (human, ("machine api.wandb.ai login user password {}", "machine git.corp.example\n  login ann\n  password {}\n", "default login ann password {}")),
        "in words": (human, ("the password is {}", "Password: {}", "password is '{}'", "login failed with password \"{}\"", "passphrase: {}", "NOTE: the root password was {}")),
        "base64 JSON": (lambda: packed({"user": "ann", "p": word(draw.randrange(3, 200))}), ("{}", "data: {}", ".dockerconfigjson: {}", "config={}")),
        "JWT": (lambda: f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhbm4ifQ.{word(43, _MIXED + '_-')}", ("{}", "SLURM_JWT={}", "Bearer {}")),
        "hex 32": (lambda: word(30, _HEX) + "a7", ("DD_API_KEY={}", "comet: logged in with key {}", "api key {} is not valid", "X-Api-Key: {}")),
        "hex 40": (lambda: word(38, _HEX) + "b3", ("wandb login {}", "WANDB_API_KEY={}", "wandb: Paste an API key from your profile and hit enter: {}", "auth token {}")),
        "hex 64": (lambda: word(62, _HEX) + "c5", ("encryption key {}", "SESSION_SECRET={}", "hmac key: {}", "X-Amz-Signature={}")),
        "in colour": (lambda: mixed(20), ("\x1b[31mtoken\x1b[0m=\x1b[1m{}\x1b[0m", "\x1b[32mPASSWORD\x1b[0m: {}\x1b[0m", "api_key=\x1b[33m{}", "\\x1b[36msecret\\x1b[0m={}")),
        "Hugging Face": (lambda: "hf_" + word(34, string.ascii_letters), ("{}", "HfHubHTTPError: 401 for {}", "git clone https://user:{}@huggingface.co/x")),
        "OpenAI": (lambda: "sk-proj-" + mixed(48), ("openai key {}", "Incorrect API key provided: {}.")),
        "GitHub": (lambda: "ghp_" + mixed(36), ("remote: {}", "https://{}@github.com/corp/train.git", "pip install git+https://x-access-token:{}@github.com/corp/x")),
        "GitLab": (lambda: "glpat-" + mixed(20), ("{}", "{}\nfatal: denied", "PRIVATE-TOKEN: {}", "https://oauth2:{}@gitlab.corp.example/x.git")),
        "PyPI": (lambda: "pypi-AgEIcHlwaS5vcmc" + mixed(80), ("TWINE_PASSWORD={}", "{}")),
        "NGC": (lambda: "nvapi-" + mixed(64), ("docker login nvcr.io -u '$oauthtoken' -p {}", "NGC_API_KEY={}")),
        "docker login": (human, ("docker login -u ann -p {} registry.corp.example", "echo {} | docker login -u ann --password-stdin")),
        "URL": (human, ("redis://:{}@cache7:6379/0", "postgresql+psycopg://train:{}@db7:5432/metrics", "http_proxy=http://ann:{}@proxy:3128")),
        "JDBC": (human, ("jdbc:mysql://db7/x?user=a&password={}", "Server=db7;Database=m;Uid=a;Pwd={};")),
        "private key": (lambda: "\n".join(word(64, _MIXED + "/+") for _ in range(4)), ("-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n-----END OPENSSH PRIVATE KEY-----", "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{}\n-----END PGP PRIVATE KEY BLOCK-----", "-----BEGIN RSA PRIVATE KEY-----\n{}")),
        "JSON": (human, ('{{"password": "{}"}}', '{{\\"passwd\\": \\"{}\\"}}', "{{'api_key': '{}'}}", "Namespace(lr=0.1, db_password='{}')")),
        "argv list": (human, ("['train.py', '--password', '{}']", "args: --db-password {} --lr 0.1", "--api-key={}")),
        "header": (lambda: mixed(30), ("Authorization: Token {}", "Cookie: sid={}; theme=dark", "x-goog-api-key: {}", "Set-Cookie: session={}; Path=/")),
        "Basic": (lambda: base64.b64encode(f"ann:{human()}".encode()).decode(), ("Authorization: Basic {}", "> authorization: basic {}")),
        "password hash": (lambda: f"$6${mixed(16)}${word(86, _MIXED + './')}", ("root:{}:19000:0:99999:7:::", "{}")),
        "kubeadm": (lambda: f"{word(6, string.ascii_lowercase + string.digits)}.{word(15, string.ascii_lowercase + string.digits)}7", ("kubeadm join 10.0.0.1:6443 --token {}",)),
        "kubeconfig": (lambda: base64.b64encode(draw.randbytes(90)).decode(), ("    client-key-data: {}", "    token: {}")),
        "Sentry": (lambda: word(32, _HEX), ("SENTRY_DSN=https://{}@o12.ingest.sentry.io/34", "sentry_sdk.init(dsn='https://{}@o12.ingest.sentry.io/34')")),
        "key alone": (lambda: mixed(32), ("{}", "got {} back", "using key {}", "secret {}")),
        "Databricks": (lambda: "dapi" + word(31, _HEX) + "9", ("databricks configure {}", "{}")),
        "XML": (human, ("<password>{}</password>", "<property><name>x</name></property><secretKey>{}</secretKey>")),
        ".pgpass": (human, ("db7:5432:metrics:train:{}", "*:*:*:train:{}")),
    }  # fmt: skip
    found = []
    for kind, (make, texts) in makers.items():
        for text in texts:
            secret = make()
            found.append(Planted(kind, text.format(secret), secret))
    return found


def harmless(seed: int = 1) -> list[str]:
    """Draw 300 strings of real logs' kinds that have no secret, some with words of authentication."""
    draw = random.Random(seed)

    def h(length: int) -> str:
        return "".join(draw.choice(_HEX) for _ in range(length))

    def base32(length: int) -> str:
        return "".join(draw.choice("abcdefghijklmnopqrstuvwxyz234567") for _ in range(length))

    drawn = [
        lambda: f"commit {h(40)}",
        lambda: f"HEAD is now at {h(7)} Fix the loss",
        lambda: f"git rev-parse HEAD: {h(40)}",
        lambda: f"torch.version.git_version {h(40)}",
        lambda: f"{h(64)}  model-00001-of-00004.safetensors",
        lambda: f"sha256:{h(64)}",
        lambda: f"Digest: sha256:{h(64)}",
        lambda: f"md5 {h(32)} train.bin",
        lambda: f"checksum of token file: {h(64)}",
        lambda: f"0::/kubepods.slice/cri-containerd-{h(64)}.scope",
        lambda: f"/docker/{h(64)}",
        lambda: f"container id {h(64)}",
        lambda: f"/sys/fs/cgroup/memory/docker/{h(64)}/memory.limit_in_bytes",
        lambda: f"Loading tokenizer revision {h(40)}",
        lambda: f"~/.cache/huggingface/hub/models--gpt2/snapshots/{h(40)}/model.safetensors",
        lambda: f"/tmp/torchinductor_ann/ab/c{base32(51)}.py:33",
        lambda: f"fx graph cache miss for key f{base32(51)}",
        lambda: f"/home/ann/.triton/cache/{base32(52)}/matmul.so",
        lambda: f"NCCL INFO comm 0x{h(12)} rank 3 nranks 8 cudaDev 3 nvmlDev 3 busId 86000 commId 0x{h(16)} - Init COMPLETE",
        lambda: f"NCCL INFO Channel 0{draw.randrange(9)}/0 : {draw.randrange(8)}[{draw.randrange(8)}] -> 1[1] via P2P/CUMEM",
        lambda: f"[rank{draw.randrange(64)}]: ProcessGroupNCCL.cpp:1{draw.randrange(999)} Rank {draw.randrange(64)} OpType=ALLREDUCE, NumelIn={draw.randrange(10**6)}",
        lambda: f"GPU 0: NVIDIA H100 80GB HBM3 (serial {draw.randrange(10**12)})",
        lambda: f"frame #{draw.randrange(20)}: c10d::ProcessGroupNCCL::watchdogHandler() + 0x{h(3)} (0x{h(12)} in libtorch_cuda.so)",
        lambda: f"step {draw.randrange(10**5)} | loss {draw.random():.6f} | forward_pass: {draw.random():.3f}s backward_pass={draw.random():.3f}s",
        lambda: f"tokens per second: {draw.randrange(10**6)}, tokens: {draw.randrange(10**9)}, max_tokens={draw.randrange(8192)}",
        lambda: f"kernel: ata{draw.randrange(8)}.00: status: {{ DRDY }} sig=0x{h(8)}",
        lambda: f"layer {h(12)}: Pull complete",
        lambda: f"merge base {h(40)} of branch main",
        lambda: f"build py3.11_cuda12.1_cudnn8.9.2_{draw.randrange(9)} {h(8)}",
        lambda: f"ETag: \"{h(32)}\"",
    ]  # fmt: skip
    fixed = """\
_ZN5torch8autograd6Engine17evaluate_functionERSt10shared_ptrINS0_9GraphTaskEEPNS0_4NodeERNS0_11InputBufferE
_ZN4c10d16ProcessGroupNCCL8WorkNCCL15checkTimeoutEN3std8optionalINS3_6chrono8durationIlNS3_5ratioILl1ELl1000E
ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn
sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas
cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_tn_align8
Cijk_Ailk_Bljk_HHS_BH_MT128x256x16_MI32x32x8x1_SE_1LDSB0_APM1_ABV0_ACED0_AF0EM8_AF1EM1_AMAS3_ASE_ASGT_ASAE01
triton_poi_fused__to_copy_add_mul_0d1d2d3de4de
triton_red_fused_native_layer_norm_backward_17
void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >
ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)
nvidia-nccl-cu12==2.27.5
torch-2.9.0+cu128-cp311-cp311-manylinux_2_28_x86_64.whl
flash_attn-2.8.3+cu12torch2.8cxx11abiTRUE-cp311-cp311-linux_x86_64.whl
libnvidia-ml.so.580.95.05 libcudart.so.12.8.90
max_tokens=4096 temperature=0.7
TOKENIZERS_PARALLELISM=false
special tokens: {'bos_token': '<s>', 'eos_token': '</s>', 'pad_token': '<pad>'}
token_type_ids is not used
The attention mask and the pad token id were not set
Setting `pad_token_id` to `eos_token_id`:50256 for open-end generation.
Missing key(s) in state_dict: "model.layers.0.self_attn.q_proj.weight".
Unexpected key: module.transformer.h.11.attn.c_attn.weight
KeyError: 'optimizer_state'
key=layers.0.mlp.up_proj.weight shape=(11008, 4096)
key: embed_tokens.weight
loaded key model.layers.31.input_layernorm.weight
sort_key=length partition_key=rank
primary key (id)
KeyboardInterrupt
password authentication failed for user
Permission denied (publickey,password).
The password is required
the password is incorrect
Password is not set
password expired
passwordless ssh is required between the nodes
no password given
ssh: password authentication is disabled
Authentication failed.
AuthType=auth/munge
slurmd: auth/munge: authentication plugin loaded
author=ann authorized_keys
Munge decode failed: Expired credential
slurmstepd: error: credential revoked
CredType=cred/munge
sudo: a terminal is required to read the password
token bucket is full
invalid token in the stream at line 3
SyntaxError: unexpected token ')'
next token: the
tokenizer.json: 100%
tokenizer_path=/data/tok/tokenizer.model
secret sauce is the learning rate
bypass=1 compass: north
forward_pass=12ms first-pass: 3
num_passes: 3
PWD=/data/run7
OLDPWD=/scratch/run7/code
SSH_AUTH_SOCK=/tmp/ssh-XXXXabcd/agent.4711
KRB5CCNAME=FILE:/tmp/krb5cc_1000
AWS_CONFIG_FILE=/etc/aws/config
HF_TOKEN_PATH=/data/cache/token
SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
signature: (Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor
sig=11 signal=SIGSEGV
Signature mismatch: expected 3 arguments
def forward(self, key, value): key = self.k_proj(x)
key = key.transpose(1, 2)
query: torch.Size([8, 32, 4096, 128]) key: torch.Size([8, 8, 4096, 128])
past_key_values is None
auth = None, token = None, password=None
api_key=os.environ["OPENAI_API_KEY"]
password = getpass.getpass()
use_auth_token=True
--use-auth-token is deprecated
wandb: Currently logged in as: ann
wandb: Run data is saved locally in /data/wandb/run-20261125_101112-3k2j1h4g
wandb: Syncing run fine-sun-42
MASTER_ADDR=node7 MASTER_PORT=29500
NCCL_IB_HCA=mlx5_0:1,mlx5_3:1 NCCL_SOCKET_IFNAME=eth0
NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.1.2.3<0>
NCCL INFO Bootstrap : Using eth0:10.1.2.3<0>
CUDA_VISIBLE_DEVICES=0,1,2,3
LD_LIBRARY_PATH=/usr/local/cuda-12.8/lib64:/opt/amazon/efa/lib
SLURM_JOB_NODELIST=node[7-18] SLURM_STEP_ID=0
2026-11-25T10:11:12.123456Z INFO trainer: checkpoint saved to /scratch/run7/ckpt/step_00012000/rank_00031.distcp
/data/imagenet/train/n01440764/n01440764_10026.JPEG
/mnt/Llama-3.1-8B-Instruct/model-00003-of-00004.safetensors
meta-llama/Llama-3.1-405B-Instruct-FP8
mistralai/Mixtral-8x22B-Instruct-v0.1
deepseek-ai/DeepSeek-R1-Distill-Qwen-32B
epoch=3-step=12000-val_loss=0.1234.ckpt
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node7:29500 --rdzv-id 4711 train.py
mysql.connector.errors.InterfaceError: 2003: Can't connect to MySQL server on 'db7:3306'
curl -fsSL https://download.pytorch.org/whl/cu128 -o x.html
docker run --gpus all -p 8080:8080 nvcr.io/nvidia/pytorch:25.10-py3
ssh -p 2222 node7 nvidia-smi
mysql -h db7 -P 3306 -u train
nvidia-smi -q -d ECC -i 0
rsync -a --progress /data/a /data/b
http://node7:8265/api/jobs
tcp://[::1]:29500
https://github.com/pytorch/pytorch/issues/174338
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-ib-hca
SHA256:nThbg6kXUpJWGl7E1IGOCspRomTxdCARLviKw6E5SY8 (ED25519)
sha512-oKnbhFyRIXpUuez8iBMmyEa4nbj4IOQyuhc/wy9kY7/WVPcwIO9VA668Pu8RkO7+0G76SLROeyw9CpQ061i4mA==
WARNING:root:Found credentials in shared credentials file: ~/.aws/credentials
botocore.exceptions.NoCredentialsError: Unable to locate credentials
google.auth.exceptions.DefaultCredentialsError: Your default credentials were not found
huggingface_hub.errors.LocalTokenNotFoundError: Token is required (`token=True`), but no token found.
requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/api/models/x
RuntimeError: CUDA error: an illegal memory access was encountered
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.11 GiB
Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=1048576, Timeout(ms)=600000)
[c10d] The client socket has failed to connect to [node7]:29500 (errno: 111 - Connection refused).
dist init_r0z1: store key 'default_pg/0//cuda//timeline_0'
c10::DistBackendError: [3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0'
key-value store: waiting for keys worker_count
Store key barrier_3 was not set
torch.compile cache key changed
hash mismatch for key 0
keyword arguments: lr, wd
monkey patching keyboard hotkey
turkey=1
KMP_AFFINITY=granularity=fine,compact,1,0
OMP_NUM_THREADS=8
NVIDIA_DRIVER_CAPABILITIES=compute,utility
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
nvlink NVLinkFabricState GPU-Fabric-Cluster state Completed
0000:86:00.0 3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev a1)
mlx5_0 port 1 ==> ibs1f0 (Up) fw 28.39.1002
Xid (PCI:0000:86:00): 79, pid=4711, name=python, GPU has fallen off the bus.
kubelet: secret "regcred" not found
MountVolume.SetUp failed for volume "token-vol": secret "ann" not found
imagePullSecrets: regcred
serviceAccountToken: expirationSeconds: 3607
automountServiceAccountToken: false
secretKeyRef: name: hf key: token
BatchNorm2dBackward0 AddmmBackward0 NllLossBackward0
DistributedDataParallel(module=ResNet50V2)
Float8E4M3FNuzTensorImplType
TransformerEncoderLayerNorm2dBackward
session is closed
login node: use srun
logged in to node7
Last login: Wed Nov 25 21:40:24 2026 from 10.1.2.3
machine learning is fun
the default login shell is bash
account=ml qos=high
Account key rotation is due
access denied
rank 3 key exchange done
private key file /home/ann/.ssh/id_ed25519 is readable by others
""".splitlines()
    found = list(fixed)
    while len(found) < 300:
        found.append(drawn[len(found) % len(drawn)]())
    return found[:300]
