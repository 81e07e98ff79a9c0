package call

import (
	"codeq/internal/engine"
	"codeq/internal/wire"
)

// Index asks for the last log entry that a leader has applied.
type Index struct{ Applied uint64 }

func (b *Index) Append(dst []byte) []byte      { return dst }
func (b *Index) Read(*wire.Reader)             {}
func (b *Index) AppendReply(dst []byte) []byte { return wire.AppendUint(dst, b.Applied) }
func (b *Index) ReadReply(r *wire.Reader)      { b.Applied = r.Uint() }
func (b *Index) Again()                        {}

// Barrier makes the owner of a shard stand still. It answers as Index.
type Barrier struct {
	Index
	ID uint64
}

func (b *Barrier) Append(dst []byte) []byte { return wire.AppendUint(dst, b.ID) }
func (b *Barrier) Read(r *wire.Reader)      { b.ID = r.Uint() }

// Resume ends a Barrier.
type Resume struct {
	Silent
	ID uint64
}

func (b *Resume) Append(dst []byte) []byte { return wire.AppendUint(dst, b.ID) }
func (b *Resume) Read(r *wire.Reader)      { b.ID = r.Uint() }

// Idle waits until queues are idle in a shard.
type Idle struct {
	engine.Idleness
	Epoch  uint64 // of the shard
	Waited bool
}

func (b *Idle) Append(dst []byte) []byte { return wire.AppendStrings(dst, b.Queues) }
func (b *Idle) Read(r *wire.Reader)      { b.Queues = r.Strings() }

func (b *Idle) AppendReply(dst []byte) []byte {
	return wire.AppendUint(wire.AppendUint(wire.AppendBool(dst, b.Waited), b.Arrived), b.Epoch)
}

func (b *Idle) ReadReply(r *wire.Reader) { b.Waited, b.Arrived, b.Epoch = r.Bool(), r.Uint(), r.Uint() }

// Again reports a wait: while there was no leader, tasks may have come and gone.
func (b *Idle) Again() { b.Waited = true }
