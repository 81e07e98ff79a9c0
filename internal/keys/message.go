package keys

import "encoding/binary"

// Message is what one shard has another one do, in the same commit as what
// made it necessary: it is kept in the range Outbound until it has been taken.
// The kinds differ in what they use.
type Message struct {
	Kind byte

	Queue string // of MsgAdmit and MsgSettings

	// Of MsgAdmit: a task to be produced.
	Tenant   string
	Priority uint8
	Record   []byte

	// Of MsgDepend and MsgEnded: a task, and one that waits for its end.
	Parent  ID
	Child   ID
	Outcome byte // MsgDepend: what the parent's death means; MsgEnded: how it ended

	Settings []byte // of MsgSettings: an encoded SettingsValue
}

// The kinds of messages.
const (
	MsgAdmit    = 1 // produce the task
	MsgDepend   = 2 // Child, of the sender, waits for Parent
	MsgEnded    = 3 // Parent, of the sender, has ended for Child
	MsgSettings = 4 // go by the settings, unless there are newer ones
)

// Append appends the encoded message.
func (m *Message) Append(dst []byte) []byte {
	dst = append(dst, m.Kind)
	switch m.Kind {
	case MsgAdmit:
		dst = append(dst, m.Priority)
		dst = appendString(appendString(dst, m.Queue), m.Tenant)
		return append(dst, m.Record...)
	case MsgSettings:
		return append(appendString(dst, m.Queue), m.Settings...)
	default:
		dst = append(append(dst, m.Parent[:]...), m.Child[:]...)
		return append(dst, m.Outcome)
	}
}

func appendString(dst []byte, s string) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(s))), s...)
}

// ParseMessage reads a message. Record and Settings alias b.
func ParseMessage(b []byte) (m Message, err error) {
	r := reader{b: b, ok: true}
	if kind := r.bytes(1); r.ok {
		m.Kind = kind[0]
	}
	switch m.Kind {
	case MsgAdmit:
		if p := r.bytes(1); r.ok {
			m.Priority = p[0]
		}
		m.Queue, m.Tenant = r.string(), r.string()
		if r.ok {
			m.Record = b[r.n:]
		}
	case MsgDepend, MsgEnded:
		copy(m.Parent[:], r.bytes(IDLen))
		copy(m.Child[:], r.bytes(IDLen))
		if o := r.bytes(1); r.ok {
			m.Outcome = o[0]
		}
		r.ok = r.ok && r.n == len(b)
	case MsgSettings:
		if m.Queue = r.string(); r.ok {
			m.Settings = b[r.n:]
		}
	default:
		r.ok = false
	}
	if !r.ok {
		return Message{}, malformed("message", b)
	}
	return m, nil
}

func (r *reader) string() string {
	n := r.uvarint()
	if !r.ok || n > uint64(len(r.b)-r.n) {
		r.ok = false
		return ""
	}
	return string(r.bytes(int(n)))
}
