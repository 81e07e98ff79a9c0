package taskbatch

import (
	"codeq/internal/engine"
	"codeq/internal/record"
	"codeq/internal/wire"
)

// Append appends new tasks to a call of another node. Their records contain what binds them to
// others.
func Append(dst []byte, tasks []engine.NewTask) []byte {
	dst = wire.AppendUint(dst, uint64(len(tasks)))
	for i := range tasks {
		t := &tasks[i]
		dst = wire.AppendBytes(dst, t.Key.Queue)
		dst = wire.AppendBytes(dst, t.Key.Tenant)
		dst = append(dst, t.Key.Priority)
		dst = wire.AppendBool(dst, t.Tied != nil)
		dst = wire.AppendBytes(dst, t.Rec)
	}
	return dst
}

// Read reads tasks written by Append, on a node that may have other limits. The records alias the
// message.
func Read(r *wire.Reader) []engine.NewTask {
	n := r.Count(5)
	if n == 0 {
		return nil
	}
	tasks := make([]engine.NewTask, n)
	tied, cost := false, Cost{}
	for i := range tasks {
		t := &tasks[i]
		t.Key = engine.LaneKey{Queue: r.String(), Tenant: r.String(), Priority: r.Byte()}
		bound := r.Bool()
		t.Rec = r.Bytes()
		rec, err := record.Decode(t.Rec)
		if err != nil || !t.Valid(&rec, i) {
			r.Fail()
			return nil
		}
		t.RunAt = rec.RunAt
		if bound {
			t.Tied, tied = engine.TiedOf(&rec), true
		}
		if cost.Add(t, MaxLimits) != nil {
			r.Fail()
			return nil
		}
	}
	if tied {
		FindTwins(tasks)
	}
	return tasks
}
