package keys

import "codeq/internal/wire"

// Message is a request of one shard to another one. It is stored in the same commit as what made it
// necessary, and is kept in the range Outbound until it was taken. Each kind uses its own fields.
type Message struct {
	Kind byte

	Queue string // of MsgAdmit, MsgFollow and MsgSettings

	// For MsgAdmit and MsgFollow: a task to be produced.
	Tenant   string
	Priority uint8
	Record   []byte

	// For MsgDepend and MsgEnded: a task, and one that waits for its end. MsgUnpin and MsgFollow
	// have only Parent, and MsgLeft only Child.
	Parent  ID
	Child   ID
	Outcome byte // MsgDepend: what to do if the parent dies, or is missing; MsgEnded: how it ended

	Settings []byte // of MsgSettings: an encoded SettingsValue

	Until uint64 // of MsgUnpin and MsgLeft: parents are kept at least until then; wall clock, ms
}

// The kinds of messages.
const (
	MsgAdmit    = 1 // produce the task
	MsgDepend   = 2 // Child, of the sender, waits for Parent
	MsgEnded    = 3 // Parent, of the sender, has ended for Child
	MsgSettings = 4 // adopt the settings, unless there are newer ones
	MsgUnpin    = 5 // Parent has one pin less
	MsgLeft     = 6 // Child, of the sender, does not need its parents any more
	MsgFollow   = 7 // produce the task, in whose sender's commit Parent was completed; since format 7
)

// Append appends the encoded message.
func (m *Message) Append(dst []byte) []byte {
	dst = append(dst, m.Kind)
	switch m.Kind {
	case MsgAdmit, MsgFollow:
		if m.Kind == MsgFollow {
			dst = append(dst, m.Parent[:]...)
		}
		dst = append(dst, m.Priority)
		dst = wire.AppendBytes(wire.AppendBytes(dst, m.Queue), m.Tenant)
		return append(dst, m.Record...)
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

// ParseMessage reads a message. Record and Settings alias b.
func ParseMessage(b []byte) (m Message, err error) {
	r := wire.NewReader(b)
	m.Kind = r.Byte()
	switch m.Kind {
	case MsgAdmit, MsgFollow:
		if m.Kind == MsgFollow {
			m.Parent = ReadID(r)
		}
		m.Priority = r.Byte()
		m.Queue, m.Tenant = r.String(), r.String()
		m.Record = r.Rest()
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
