package call

import (
	"codeq/internal/engine"
	"codeq/internal/record"
	"codeq/internal/wire"
)

// AppendTasks appends new tasks to a call of another node. Their records contain what binds them to
// others.
func AppendTasks(dst []byte, tasks []engine.NewTask) []byte {
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

// ReadTasks reads tasks written by AppendTasks, on a node that may have other limits. The records
// alias the message.
func ReadTasks(r *wire.Reader) []engine.NewTask {
	n := r.Count(5)
	if n == 0 {
		return nil
	}
	tasks := make([]engine.NewTask, n)
	tied, cost := false, BatchCost{}
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
		if cost.Add(t, MaxBatchLimits) != nil {
			r.Fail()
			return nil
		}
	}
	if tied {
		findTwins(tasks)
	}
	return tasks
}
