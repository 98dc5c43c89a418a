// What a launch of codebook_wgmma.cu works on, and which stages of which tiles a block takes, in what order.

struct Maps {
    TensorMap codes, scales;
};

struct Problem {
    const u8* x;            // its image: COLUMNS * 512 bytes a stage, then (X_TYPE 1) what undoes its scaling, COLUMNS * 16 + 16 a stage
    const void* bias;       // of x's type or fp32, or null
    void* out;
    long long x_stride;     // nobody's: the image has no rows
    int m, n, k;
    int bias_is_fp32;
    int units;              // units of K that a rank owns, a multiple of TEAM
    Expand expand;          // adapters
};

#if SPREAD
// How stages are spread: they are numbered through all tiles, tile after tile, and so are pieces, each a run of as many stages.
struct Shares {
    int each, longer;      // stages of a block; how many blocks, the first, have one more
    int run;               // stages of a piece
    u32 inverse;           // 2^32 / run, rounded up
    int tiles;

    METHOD int begin(int block) const { return block * each + min(block, longer); }
    METHOD int piece_with(int stage) const { return (u64)(u32)stage * inverse >> 32; }
};

// What a block does with a piece. No share is shorter than a piece: the launcher sees to that. So a block has all of its pieces but
// the end of its last, with which the next block goes on, and the begin of its first, whose chains the block before hands over.
// It takes its last piece first, so that nobody waits for chains, and its first piece last.
struct Turn {
    int piece, begin, end;    // of all stages

    METHOD static int count(const Shares& s, int block) { return s.piece_with(s.begin(block + 1) - 1) - s.piece_with(s.begin(block)) + 1; }
    METHOD Turn(const Shares& s, int block, int turn) {
        const int first = s.begin(block), last = s.begin(block + 1) - 1, count = Turn::count(s, block);
        piece = s.piece_with(first) + (turn == 0 ? count - 1 : turn == count - 1 ? 0 : turn);
        begin = max(piece * s.run, first), end = min((piece + 1) * s.run, last + 1);
    }
    METHOD int tile() const { return piece / PIECES; }
    METHOD int stages() const { return end - begin; }
    METHOD int unit(const Shares& s) const { return (begin - tile() * PIECES * s.run) * TEAM; }
    METHOD bool begun(const Shares& s) const { return begin > piece * s.run; }          // by another block
    METHOD bool whole(const Shares& s) const { return end == (piece + 1) * s.run; }     // at its end
};

using Cut = Shares;    // what a walk follows

// All stages of a block: turn after turn.
struct Walk {
    int turn, left, first, rows;    // stages left of a turn, its next unit, its tile's

    METHOD explicit Walk(const Shares& s) : turn(0) { take(s); }
    METHOD int unit() const { return first; }
    METHOD int tile() const { return rows; }
    METHOD bool done(const Shares&) const { return left == 0; }
    METHOD void step(const Shares& s) {
        first += TEAM;
        if (--left == 0 && ++turn < Turn::count(s, blockIdx.x)) take(s);
    }
    METHOD void take(const Shares& s) {
        const Turn now(s, blockIdx.x, turn);
        left = now.stages(), first = now.unit(s), rows = now.tile();
    }
};
#else
struct Piece {
    int unit, stages;    // its first unit of K, and its stages
};

DEVICE Piece piece_of(const Problem& p, int cluster_rank, int piece) {
    const int number = cluster_rank * PIECES + piece, begin = number / 4 * p.units, end = min(p.k / UNIT, begin + p.units);
    const int run = (end - begin + 15) / 16 * TEAM, unit = begin + number % 4 * run;    // as codebook_mma's teams have it
    return {unit, max(0, (min(end, unit + run) - unit + TEAM - 1) / TEAM)};
}

using Cut = Problem;    // what a walk follows

// All stages of a block: tile after tile, piece after piece.
struct Walk {
    int at, piece, stage;    // at: the tile
    Piece now;

    METHOD explicit Walk(const Problem& p) : at(blockIdx.x / CLUSTER), piece(0), stage(0), now(piece_of(p, blockIdx.x % CLUSTER, 0)) { settle(p); }
    METHOD int unit() const { return now.unit + TEAM * stage; }
    METHOD int tile() const { return at; }
    METHOD bool done(const Problem& p) const { return at * ROWS >= p.n; }
    METHOD void step(const Problem& p) { ++stage, settle(p); }
    METHOD void settle(const Problem& p) {    // the next piece that has a stage
        while (stage >= now.stages && at * ROWS < p.n) {
            if (++piece == PIECES) piece = 0, at += gridDim.x / CLUSTER;
            stage = 0, now = piece_of(p, blockIdx.x % CLUSTER, piece);
        }
    }
};
#endif
