package call

import (
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/wire"
)

// Produce stores tasks.
type Produce struct {
	Tasks []engine.NewTask
	Call  keys.CallNumber
	engine.Produced
}

// Append leaves out Call.Node, which the receiver knows by the connection.
func (b *Produce) Append(dst []byte) []byte {
	dst = wire.AppendUint(wire.AppendUint(dst, b.Call.Incarnation), b.Call.Seq)
	return appendTasks(wire.AppendUint(dst, b.Call.Low), b.Tasks)
}

func (b *Produce) Read(r *wire.Reader) {
	b.Call.Incarnation, b.Call.Seq, b.Call.Low = r.Uint(), r.Uint(), r.Uint()
	b.Tasks = readTasks(r)
}

func (b *Produce) AppendReply(dst []byte) []byte {
	return keys.AppendIndexes(keys.AppendIDs(dst, b.IDs), b.Duplicates)
}

func (b *Produce) ReadReply(r *wire.Reader) {
	b.IDs = append(b.IDs, keys.ReadIDs(r)...)
	b.Duplicates = append(b.Duplicates, keys.ReadIndexes(r)...)
	if len(b.IDs) != len(b.Tasks) {
		r.Fail()
	}
}

func (b *Produce) Again() { b.IDs, b.Duplicates = b.IDs[:0], b.Duplicates[:0] }

// appendTasks appends new tasks to a call of another node. Their records contain what binds them to
// others.
func appendTasks(dst []byte, tasks []engine.NewTask) []byte {
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

// readTasks reads tasks written by appendTasks, on a node that may have other limits. The records
// alias the message.
func readTasks(r *wire.Reader) []engine.NewTask {
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
