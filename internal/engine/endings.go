package engine

import (
	"codeq/internal/container/recent"
	"codeq/internal/keys"
)

// endingsFor is for how long find returns an ending, ms.
const endingsFor = 10 * 60 * 1000

// endings remembers the outcomes of tasks that are not kept, since the load of the shard.
type endings struct{ recent recent.Texts[keys.ID, ending] }

// ending is small, as each completion writes one.
type ending struct {
	at       uint64 // uptime, ms
	attempts uint32
	state    TaskState
}

// add remembers an ending, unless its texts are too long.
func (e *endings) add(id keys.ID, uptime uint64, state TaskState, attempts uint32, result []byte, cause string) {
	e.recent.Add(id, ending{uptime, attempts, state}, result, cause)
}

// find returns a copy of the outcome of a task; nil: it is not known.
func (e *endings) find(id keys.ID, uptime uint64) *Outcome {
	end, result, cause, ok := e.recent.Find(id)
	if !ok || end.at+endingsFor < uptime {
		return nil
	}
	return &Outcome{State: end.state, Attempts: int(end.attempts), Result: result, LastError: cause}
}
