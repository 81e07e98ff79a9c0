package codeq

import (
	"codeq/internal/record"
	"codeq/internal/wire"
)

// appendTasks appends new tasks to a call of another node. What binds them to
// others is in their records.
func appendTasks(dst []byte, tasks []newTask) []byte {
	dst = wire.AppendUint(dst, uint64(len(tasks)))
	for i := range tasks {
		t := &tasks[i]
		dst = wire.AppendBytes(dst, t.key.queue)
		dst = wire.AppendBytes(dst, t.key.tenant)
		dst = append(dst, t.key.priority)
		dst = wire.AppendBool(dst, t.tied != nil)
		dst = wire.AppendBytes(dst, t.rec)
	}
	return dst
}

// farLimits are what bounds the batches of other nodes, whose own limits may be others.
var farLimits = Limits{Parents: maxBatchParents, CommitBytes: maxCommitBytes}

// readTasks reads what appendTasks has written. The records alias the message.
func readTasks(r *wire.Reader) []newTask {
	n := r.Count(5)
	if n == 0 {
		return nil
	}
	tasks := make([]newTask, n)
	tied, cost := false, commitCost{}
	for i := range tasks {
		t := &tasks[i]
		t.key = laneKey{queue: r.String(), tenant: r.String(), priority: r.Byte()}
		bound := r.Bool()
		t.rec = r.Bytes()
		rec, err := record.Decode(t.rec)
		if err != nil || !t.valid(&rec, i) {
			r.Fail()
			return nil
		}
		t.runAt = rec.RunAt
		if bound {
			t.tied, tied = tiedOf(&rec), true
		}
		if cost.add(t, &farLimits) != nil {
			r.Fail()
			return nil
		}
	}
	if tied {
		findTwins(tasks)
	}
	return tasks
}
