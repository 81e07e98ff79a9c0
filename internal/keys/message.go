package keys

import "codeq/internal/wire"

// Message is a request of one shard to another one. It is stored in the same commit as its cause,
// and is kept in the range Outbound until it is taken. Each kind uses its own fields.
type Message struct {
	Kind byte

	Queue string // of MsgAdmit, MsgFollow, MsgTick and MsgSettings

	// For MsgAdmit, MsgFollow and MsgTick: the task to produce.
	Tenant   string
	Priority uint8
	Record   []byte

	// For MsgFlow: the tasks to produce, in the order of their batch, and their already produced
	// parents of the same batch, in ascending order. Nth refers to one of Tasks.
	Tasks    []MessageTask
	Siblings []ID

	// For MsgDepend and MsgEnded: a task, and one that waits for its end. MsgUnpin, MsgFollow and
	// MsgFlow only have Parent, MsgLeft only Child.
	Parent  ID
	Child   ID
	Outcome byte // MsgDepend: the action on a parent's death; MsgEnded: the parent's end

	Settings []byte // of MsgSettings: an encoded SettingsValue

	Until uint64 // of MsgUnpin and MsgLeft: parents are kept at least until then; wall clock, ms

	// For MsgTick and MsgTicked: a schedule, and one of its ticks; wall clock, ms.
	Schedule string
	Tick     uint64
}

// MessageTask is one of several tasks to produce.
type MessageTask struct {
	Queue, Tenant string
	Priority      uint8
	Record        []byte
}

// The kinds of messages.
const (
	MsgAdmit    = 1  // produce the task
	MsgDepend   = 2  // Child, of the sender, waits for Parent
	MsgEnded    = 3  // Parent, of the sender, has ended for Child
	MsgSettings = 4  // adopt the settings, unless there are newer ones
	MsgUnpin    = 5  // remove a pin of Parent
	MsgLeft     = 6  // Child, of the sender, no longer needs its parents
	MsgFollow   = 7  // produce the task; the sender has completed Parent in the same commit
	MsgFlow     = 8  // produce the tasks, and pass on others; Parent: zero or as in MsgFollow
	MsgTick     = 9  // produce the task of the tick, and answer with MsgTicked
	MsgTicked   = 10 // the task of the tick was produced
)

// HasTasks reports whether a message has tasks to produce.
func (m *Message) HasTasks() bool {
	switch m.Kind {
	case MsgAdmit, MsgFollow, MsgFlow, MsgTick:
		return true
	}
	return false
}

// Append appends the encoded message.
func (m *Message) Append(dst []byte) []byte {
	dst = append(dst, m.Kind)
	switch m.Kind {
	case MsgAdmit, MsgFollow, MsgTick:
		switch m.Kind {
		case MsgFollow:
			dst = append(dst, m.Parent[:]...)
		case MsgTick:
			dst = AppendNumber(wire.AppendBytes(dst, m.Schedule), m.Tick)
		}
		dst = append(dst, m.Priority)
		dst = wire.AppendBytes(wire.AppendBytes(dst, m.Queue), m.Tenant)
		return append(dst, m.Record...)
	case MsgFlow:
		dst = AppendIDs(append(dst, m.Parent[:]...), m.Siblings)
		for i := range m.Tasks {
			t := &m.Tasks[i]
			dst = wire.AppendBytes(wire.AppendBytes(append(dst, t.Priority), t.Queue), t.Tenant)
			dst = wire.AppendBytes(dst, t.Record)
		}
		return dst
	case MsgTicked:
		return AppendNumber(wire.AppendBytes(dst, m.Schedule), m.Tick)
	case MsgSettings:
		return append(wire.AppendBytes(dst, m.Queue), m.Settings...)
	case MsgUnpin:
		return AppendNumber(append(dst, m.Parent[:]...), m.Until)
	case MsgLeft:
		return AppendNumber(append(dst, m.Child[:]...), m.Until)
	default:
		dst = append(append(dst, m.Parent[:]...), m.Child[:]...)
		return append(dst, m.Outcome)
	}
}

// ParseMessage reads a message. Record, those of Tasks, and Settings alias b.
func ParseMessage(b []byte) (m Message, err error) {
	r := wire.NewReader(b)
	m.Kind = r.Byte()
	switch m.Kind {
	case MsgAdmit, MsgFollow, MsgTick:
		switch m.Kind {
		case MsgFollow:
			m.Parent = ReadID(r)
		case MsgTick:
			m.Schedule, m.Tick = r.String(), r.Fixed64()
		}
		m.Priority = r.Byte()
		m.Queue, m.Tenant = r.String(), r.String()
		m.Record = r.Rest()
	case MsgFlow:
		m.Parent, m.Siblings = ReadID(r), ReadIDs(r)
		for again := true; again; again = r.Len() > 0 {
			m.Tasks = append(m.Tasks, MessageTask{Priority: r.Byte(), Queue: r.String(), Tenant: r.String(), Record: r.Bytes()})
		}
	case MsgTicked:
		m.Schedule, m.Tick = r.String(), r.Fixed64()
	case MsgDepend, MsgEnded:
		m.Parent, m.Child = ReadID(r), ReadID(r)
		m.Outcome = r.Byte()
	case MsgUnpin:
		m.Parent, m.Until = ReadID(r), r.Fixed64()
	case MsgLeft:
		m.Child, m.Until = ReadID(r), r.Fixed64()
	case MsgSettings:
		m.Queue = r.String()
		m.Settings = r.Rest()
	default:
		r.Fail()
	}
	if r.Done() != nil {
		return Message{}, malformed("message", b)
	}
	return m, nil
}
