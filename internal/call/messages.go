package call

import (
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/wire"
)

// AppendMessages appends messages of a shard to another one; first is the number of the first one.
func AppendMessages(dst []byte, from int, first uint64, messages []keys.Message) []byte {
	dst = wire.AppendUint(wire.AppendUint(dst, uint64(from)), first)
	dst = wire.AppendUint(dst, uint64(len(messages)))
	for i := range messages {
		dst = wire.AppendBytes(dst, messages[i].Append(nil))
	}
	return dst
}

// ReadMessages reads them. Each of them can be taken; from may be the number of no shard.
func ReadMessages(r *wire.Reader) (from int, first uint64, messages []keys.Message) {
	shard := r.Uint()
	if shard >= manifest.MaxShards {
		r.Fail()
	}
	first = r.Uint()
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
		messages = append(messages, m)
	}
	return int(shard), first, messages
}
