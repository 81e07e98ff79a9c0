package engine

import (
	"slices"

	"codeq/internal/keys"
)

const (
	// endingsHalf and endingsBytes bound each of two halves of endings: so many tasks, and so many
	// bytes of results and errors.
	endingsHalf  = 2048
	endingsBytes = 512 << 10
	// endingsFor is for how long find returns an ending, ms.
	endingsFor = 10 * 60 * 1000
)

// endings remembers the outcomes of tasks that are not kept, since the load of the shard: at least
// the last endingsHalf, or as many as their texts have room for.
type endings struct{ now, before endingsOf }

// endingsOf is one half: it is filled, and then forgotten as a whole.
type endingsOf struct {
	ids   []keys.ID // separate: a search reads nothing else
	ends  []ending
	texts []byte
}

// ending is small, as each completion writes one.
type ending struct {
	at       uint64 // uptime, ms
	attempts uint32
	text     uint32 // where its result begins in texts; its error follows
	result   uint32 // length
	cause    uint32 // length
	state    TaskState
}

// add remembers an ending, unless its texts are too long.
func (e *endings) add(id keys.ID, uptime uint64, state TaskState, attempts uint32, result []byte, cause string) {
	size := len(result) + len(cause)
	if size > endingsBytes {
		return
	}
	h := &e.now
	if len(h.ids) == endingsHalf || len(h.texts)+size > endingsBytes {
		e.now, e.before = e.before, e.now
		h.ids, h.ends, h.texts = h.ids[:0], h.ends[:0], h.texts[:0]
	}
	h.ids = append(h.ids, id)
	h.ends = append(h.ends, ending{uptime, attempts, uint32(len(h.texts)), uint32(len(result)), uint32(len(cause)), state})
	if size > 0 {
		h.texts = append(append(h.texts, result...), cause...)
	}
}

// find returns a copy of the outcome of a task; nil: it is not known.
func (e *endings) find(id keys.ID, uptime uint64) *Outcome {
	for _, h := range []*endingsOf{&e.now, &e.before} {
		i := slices.Index(h.ids, id)
		if i < 0 || h.ends[i].at+endingsFor < uptime {
			continue
		}
		end := &h.ends[i]
		texts := h.texts[end.text:]
		return &Outcome{
			State: end.state, Attempts: int(end.attempts),
			Result: append([]byte(nil), texts[:end.result]...), LastError: string(texts[end.result:][:end.cause]),
		}
	}
	return nil
}
