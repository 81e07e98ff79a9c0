package peer

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
)

// A header begins each connection:
//
//	"codeq" | version u8 | length u16 | length bytes:
//		dialer's formats | dialer's incarnations | use u8 | group u32 | groups u32 | cluster 16 |
//		dialer's ID 16 | target's ID 16 | length u8 | dialer's name | target's name
//
// and the accepting side answers, in any version of the protocol:
//
//	0, or a Reason | length u8 | cluster 16 | ID 16 | formats | incarnations, or a text
//
// Formats are newest u16 | least u16, and incarnations are count u8 | count u64s.
//
// Integers are big-endian. Up to the length, headers of all versions are alike, so that one of
// another version can be read to its end and refused: closing a connection with unread bytes may
// destroy the answer under way. Nothing follows the header before the answer has come.
const (
	magic       = "codeq"
	version     = 4 // what else two nodes say to each other depends on their formats
	headerFixed = len(magic) + 3
	formatsLen  = 2 + 2
	headerBody  = 1 + 4 + 4 + 3*len(ID{}) + 1
	maxHeader   = 1024 // bytes after the length, of any version
	maxName     = 255
)

// Uses of a connection.
const (
	useCalls byte = 1 + iota
	useRaft
	useIntroduction // calls between nodes that need not be of one cluster
	useFiles        // files of a group's snapshot
)

type header struct {
	use          byte
	group        uint32 // of useRaft and useFiles, else zero
	groups       uint32 // number of groups of the dialer
	from         Identity
	to           Identity // its Cluster is that of from
	formats      Formats  // of the dialer
	incarnations []uint64 // see Incarnations.said
}

// ofGroup reports whether a connection of this use belongs to a group.
func ofGroup(use byte) bool { return use == useRaft || use == useFiles }

// errHeader says that the dialer uses another protocol.
var errHeader = errors.New("peer: not a header")

func encodeHeader(h header) []byte {
	b := []byte(magic)
	length := headerBody + len(h.from.Name) + len(h.to.Name)
	b = append(b, version)
	b = binary.BigEndian.AppendUint16(b, uint16(formatsLen+incarnationsLen(h.incarnations)+length))
	b = appendIncarnations(h.formats.append(b), h.incarnations)
	b = append(b, h.use)
	b = binary.BigEndian.AppendUint32(b, h.group)
	b = binary.BigEndian.AppendUint32(b, h.groups)
	b = append(b, h.from.Cluster[:]...)
	b = append(b, h.from.ID[:]...)
	b = append(b, h.to.ID[:]...)
	b = append(b, byte(len(h.from.Name)))
	b = append(b, h.from.Name...)
	return append(b, h.to.Name...)
}

// readHeader reads exactly one header. It returns a *RefusedError if the header is complete but of
// another version, and errHeader or an error of r if no answer should be sent.
func readHeader(r io.Reader) (header, error) {
	var buf [maxHeader]byte
	fixed := buf[:headerFixed]
	if _, err := io.ReadFull(r, fixed); err != nil {
		return header{}, fmt.Errorf("peer: read header: %w", err)
	}
	if string(fixed[:len(magic)]) != magic {
		if isTLS(fixed) {
			return header{}, errTLS
		}
		return header{}, fmt.Errorf("%w: begins with %q", errHeader, fixed[:len(magic)])
	}
	v, length := fixed[len(magic)], int(binary.BigEndian.Uint16(fixed[len(magic)+1:]))
	if length > maxHeader {
		return header{}, fmt.Errorf("%w: of %d bytes", errHeader, length)
	}
	body := buf[:length]
	if _, err := io.ReadFull(r, body); err != nil {
		return header{}, fmt.Errorf("peer: read header: %w", err)
	}
	if v != version {
		return header{}, &RefusedError{RefusedVersion, fmt.Sprintf("protocol version is %d, not %d", version, v)}
	}
	formats, incarnations, body := readSelf(body)
	if formats == (Formats{}) {
		return header{}, fmt.Errorf("%w: of %d bytes, without formats", errHeader, length)
	}
	if length = len(body); length < headerBody || length > headerBody+2*maxName {
		return header{}, fmt.Errorf("%w: of %d bytes", errHeader, length)
	}
	h := header{
		use: body[0], group: binary.BigEndian.Uint32(body[1:]), groups: binary.BigEndian.Uint32(body[5:]), formats: formats, incarnations: incarnations,
	}
	for i, id := range []*ID{&h.from.Cluster, &h.from.ID, &h.to.ID} {
		copy(id[:], body[9+i*len(id):])
	}
	h.to.Cluster = h.from.Cluster
	names, name := body[headerBody:], int(body[headerBody-1])
	if name > len(names) || len(names)-name > maxName {
		return header{}, fmt.Errorf("%w: of names of %d and %d bytes", errHeader, name, len(names)-name)
	}
	h.from.Name, h.to.Name = string(names[:name]), string(names[name:])
	if h.use < useCalls || h.use > useFiles || !ofGroup(h.use) && h.group != 0 {
		return header{}, fmt.Errorf("%w: of use %d, group %d", errHeader, h.use, h.group)
	}
	return h, nil
}

// errTLS: one side of a connection uses TLS, and the other one does not.
var errTLS = &RefusedError{RefusedTLS, "one node uses TLS and the other one does not: set Cluster.TLS on all nodes, or on none"}

// errNoAnswer: the accepting side has not understood the header, or is being closed.
var errNoAnswer = fmt.Errorf("%w: the other side has closed the connection; if it uses TLS, set Cluster.TLS on all nodes", io.EOF)

// isTLS reports whether bytes are the beginning of a record of TLS: of a handshake, or an alert.
func isTLS(b []byte) bool { return (b[0] == 22 || b[0] == 21) && b[1] == 3 }

// refuseTLS answers a dialer that uses TLS although this node does not, or the other way around.
// The answer is not in TLS: so the dialer can tell.
func refuseTLS(c net.Conn, err error) {
	record, ok := errors.AsType[tls.RecordHeaderError](err)
	switch {
	case ok && record.Conn != nil:
		c = record.Conn
	case !errors.Is(err, errTLS):
		return
	}
	if writeAnswer(c, answer{}, errTLS) == nil {
		if half, ok := c.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite() // for dialers that wait for the end
		}
		_, _ = io.CopyN(io.Discard, c, maxHeader) // unread bytes may destroy the answer under way
	}
}

// answer is the answer of an accepting side to a header.
type answer struct {
	cluster, id  ID
	formats      Formats
	incarnations []uint64
}

// writeAnswer accepts the connection if refused is nil.
func writeAnswer(w io.Writer, a answer, refused *RefusedError) error {
	reason, text := Reason(0), slices.Concat(a.cluster[:], a.id[:])
	if refused != nil {
		reason, text = refused.Reason, []byte(refused.Text[:min(len(refused.Text), 255)])
	} else {
		text = appendIncarnations(a.formats.append(text), a.incarnations)
	}
	_, err := w.Write(append([]byte{byte(reason), byte(len(text))}, text...))
	return err
}

// readAnswer reads exactly one answer of an accepting side. The error is a *RefusedError if the
// answer is a refusal, or does not come from a node.
func readAnswer(r io.Reader) (a answer, err error) {
	var buf [2 + 255]byte
	if _, err := io.ReadFull(r, buf[:2]); err != nil {
		switch {
		case errors.Is(err, io.EOF):
			err = errNoAnswer
		case errors.Is(err, os.ErrDeadlineExceeded):
			err = fmt.Errorf("%w: what listens there does not answer, as a node does at once", err)
		}
		return a, fmt.Errorf("peer: read answer to header: %w", err)
	}
	if isTLS(buf[:2]) {
		return a, errTLS
	}
	if Reason(buf[0]) > lastReason {
		return a, &RefusedError{RefusedNode, fmt.Sprintf("it is no node that answers: %q", buf[:2])}
	}
	text := buf[2 : 2+int(buf[1])]
	if _, err := io.ReadFull(r, text); err != nil {
		return a, fmt.Errorf("peer: read answer to header: %w", err)
	}
	if buf[0] != 0 {
		return a, &RefusedError{Reason(buf[0]), string(text)}
	}
	const ids = 2 * len(ID{})
	if len(text) < ids {
		return a, fmt.Errorf("%w: answer of %d bytes", errHeader, len(text))
	}
	var rest []byte
	if a.formats, a.incarnations, rest = readSelf(text[ids:]); a.formats == (Formats{}) || len(rest) > 0 {
		return a, fmt.Errorf("%w: answer of %d bytes, without formats", errHeader, len(text))
	}
	a.cluster, a.id = ID(text[:len(a.id)]), ID(text[len(a.id):ids])
	return a, nil
}

// readSelf reads formats and incarnations at the beginning of b. It returns no formats if they are
// missing.
func readSelf(b []byte) (formats Formats, incarnations []uint64, rest []byte) {
	if len(b) < formatsLen+1 || !readFormats(b).valid() {
		return formats, nil, b
	}
	count, rest := int(b[formatsLen]), b[formatsLen+1:]
	if count > MaxIncarnations || len(rest) < 8*count {
		return formats, nil, b
	}
	for range count {
		incarnations, rest = append(incarnations, binary.BigEndian.Uint64(rest)), rest[8:]
	}
	return readFormats(b), incarnations, rest
}
