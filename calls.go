package codeq

import (
	"encoding/json"

	"codeq/internal/keys"
	"codeq/internal/wire"
)

// How operations, and what has become of them, travel between nodes. What an
// operation consists of is encoded and decoded where the operation is; here is
// what all have in common.

// request is an operation whose caller waits for its outcome, and may do so on
// another node.
type request interface {
	operation
	base() *completion
	// encode appends the arguments, for decode.
	encode(dst []byte) (callKind, []byte)
	decode(r *wire.Reader)
	// encodeReply appends what resolve has decided, if it was not an error, for
	// decodeReply.
	encodeReply(dst []byte) []byte
	decodeReply(r *wire.Reader)
	// again prepares the operation for another try.
	again()
}

// The defaults: an operation without results.

func (c *completion) encodeReply(dst []byte) []byte { return dst }
func (c *completion) decodeReply(*wire.Reader)      {}
func (c *completion) again()                        { c.err = nil }

// abandoned is a request that may wait for long, and whose caller may give up.
type abandoned interface{ abandon(*shard) }

// parse has read take all of a message apart.
func parse(message []byte, read func(*wire.Reader)) error {
	r := wire.NewReader(message)
	read(r)
	return r.Done()
}

// What several operations consist of.

func appendReceipt(dst []byte, r Receipt) []byte {
	return wire.AppendUint(append(dst, r.ID[:]...), r.Token)
}

func readReceipt(r *wire.Reader) Receipt {
	return Receipt{ID: ID(keys.ReadID(r)), Token: r.Uint()}
}

func appendReceipts(dst []byte, list []Receipt) []byte {
	dst = wire.AppendUint(dst, uint64(len(list)))
	for _, receipt := range list {
		dst = appendReceipt(dst, receipt)
	}
	return dst
}

func readReceipts(r *wire.Reader) []Receipt {
	list := make([]Receipt, r.Count(keys.IDLen+1))
	for i := range list {
		list[i] = readReceipt(r)
	}
	return list
}

func appendNames(dst []byte, names []string) []byte {
	dst = wire.AppendUint(dst, uint64(len(names)))
	for _, name := range names {
		dst = wire.AppendBytes(dst, name)
	}
	return dst
}

func readNames(r *wire.Reader) []string {
	n := r.Count(1)
	if n == 0 {
		return nil
	}
	names := make([]string, n)
	for i := range names {
		names[i] = r.String()
	}
	return names
}

// appendJSON appends a value that can be encoded.
func appendJSON(dst []byte, v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic("codeq: a value without a JSON form: " + err.Error())
	}
	return append(dst, b...)
}

// readJSON decodes b, which r has read, into v.
func readJSON(r *wire.Reader, b []byte, v any) {
	if json.Unmarshal(b, v) != nil {
		r.Fail()
	}
}
