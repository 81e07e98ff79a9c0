package keys

import "encoding/binary"

// Message is what one shard has another one do, in the same commit as what
// made it necessary: it is kept in the range Outbound until it has been taken.
// The kinds differ in what they use.
type Message struct {
	Kind byte

	// Of MsgAdmit: a task to be produced.
	Queue    string
	Tenant   string
	Priority uint8
	Record   []byte

	// Of MsgDepend and MsgEnded: a task, and one that waits for its end.
	Parent  ID
	Child   ID
	Outcome byte // MsgDepend: what the parent's death means; MsgEnded: how it ended
}

// The kinds of messages.
const (
	MsgAdmit  = 1 // produce the task
	MsgDepend = 2 // Child, of the sender, waits for Parent
	MsgEnded  = 3 // Parent, of the sender, has ended for Child
)

// Append appends the encoded message.
func (m *Message) Append(dst []byte) []byte {
	dst = append(dst, m.Kind)
	if m.Kind != MsgAdmit {
		dst = append(append(dst, m.Parent[:]...), m.Child[:]...)
		return append(dst, m.Outcome)
	}
	dst = append(dst, m.Priority)
	for _, s := range []string{m.Queue, m.Tenant} {
		dst = append(binary.AppendUvarint(dst, uint64(len(s))), s...)
	}
	return append(dst, m.Record...)
}

// ParseMessage reads a message. Record aliases b.
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
