package call

import (
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/wire"
)

// Messages brings messages of a shard to another one.
type Messages struct {
	Silent
	From  int    // shard
	First uint64 // of List[0]
	List  []keys.Message
	Taken int
}

func (b *Messages) Append(dst []byte) []byte {
	dst = wire.AppendUint(wire.AppendUint(dst, uint64(b.From)), b.First)
	dst = wire.AppendUint(dst, uint64(len(b.List)))
	for i := range b.List {
		dst = wire.AppendBytes(dst, b.List[i].Append(nil))
	}
	return dst
}

// Read reads messages that can be taken; From may be the number of no shard.
func (b *Messages) Read(r *wire.Reader) {
	shard := r.Uint()
	if shard >= manifest.MaxShards {
		r.Fail()
	}
	b.From, b.First = int(shard), r.Uint()
	for range r.Count(2) {
		m, err := keys.ParseMessage(r.Bytes())
		switch {
		case err != nil:
		case m.HasTasks():
			_, err = engine.NewTasksOf(&m)
		case m.Kind == keys.MsgSettings:
			_, err = engine.ParseSettings(m.Settings)
		}
		if err != nil {
			r.Fail()
			break
		}
		b.List = append(b.List, m)
	}
}

func (b *Messages) Again() { b.Taken = 0 }

// Taken waits until another shard has taken the messages of a shard.
type Taken struct {
	Silent
	To int
}

func (b *Taken) Append(dst []byte) []byte { return wire.AppendUint(dst, uint64(b.To)) }

func (b *Taken) Read(r *wire.Reader) {
	n := r.Uint()
	if b.To = int(n); n >= manifest.MaxShards {
		r.Fail()
	}
}
