package raftlog

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/wire"
)

// A key is the group and the index. A value is
//
//	checksum    4 bytes, little-endian: CRC-32C of the key and of what follows
//	type        1 byte
//	term        uvarint
//	appended    varint seconds since 1970, uvarint nanoseconds
//	extensions  uvarint length, bytes
//	data        the rest
//
// The zone of a time and the difference between nil and empty are not kept.

const (
	groupBytes    = 4 // of a key
	keyBytes      = groupBytes + 8
	checksumBytes = 4
	maxHeader     = checksumBytes + 1 + 3*binary.MaxVarintLen64 + binary.MaxVarintLen32
)

const (
	maxGroup = 1<<32 - 1
	maxIndex = 1<<64 - 1 // beyond the indexes of entries: the range of a group ends here
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// appendKey appends the key of an entry.
func appendKey(b []byte, group uint32, index uint64) []byte {
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint32(b, group), index)
}

// indexOf returns the index in a key.
func indexOf(key []byte) uint64 { return binary.BigEndian.Uint64(key[4:]) }

// groupOf returns the group in a key.
func groupOf(key []byte) uint32 { return binary.BigEndian.Uint32(key) }

// appendHeader appends the part of a value between checksum and extensions.
func appendHeader(b []byte, l *raft.Log) []byte {
	b = append(b, byte(l.Type))
	b = wire.AppendUint(b, l.Term)
	b = wire.AppendInt(b, l.AppendedAt.Unix())
	b = wire.AppendUint(b, uint64(l.AppendedAt.Nanosecond()))
	return wire.AppendUint(b, uint64(len(l.Extensions)))
}

// appendValue appends the value of an entry. It allocates nothing if there is room.
func appendValue(b []byte, group uint32, l *raft.Log) []byte {
	start := len(b)
	b = append(b, make([]byte, checksumBytes)...)
	b = appendHeader(b, l)
	b = append(b, l.Extensions...)
	b = append(b, l.Data...)
	sum := checksum(group, l.Index, b[start+checksumBytes:])
	binary.LittleEndian.PutUint32(b[start:], sum)
	return b
}

// valueBytes returns the length of appendValue's value.
func valueBytes(l *raft.Log) int {
	var header [maxHeader]byte
	return checksumBytes + len(appendHeader(header[:0], l)) + len(l.Extensions) + len(l.Data)
}

func checksum(group uint32, index uint64, rest []byte) uint32 {
	var key [keyBytes]byte
	return crc32.Update(crc32.Checksum(appendKey(key[:0], group, index), castagnoli), castagnoli, rest)
}

// decodeValue decodes the value of an entry into l, without shared memory. On an error, which is
// ErrCorrupt, it does not change l.
func decodeValue(group uint32, index uint64, value []byte, l *raft.Log) error {
	out, err := parseValue(group, index, value)
	if err == nil {
		*l = clone(out)
	}
	return err
}

// clone returns an entry that shares no memory with l.
func clone(l raft.Log) raft.Log {
	l.Extensions, l.Data = bytes.Clone(l.Extensions), bytes.Clone(l.Data)
	return l
}

// parseValue is decodeValue, but its result shares memory with the value.
func parseValue(group uint32, index uint64, value []byte) (raft.Log, error) {
	damaged := func(what string) (raft.Log, error) {
		return raft.Log{}, fmt.Errorf("%w: group %d, index %d: %s", ErrCorrupt, group, index, what)
	}
	if len(value) <= checksumBytes {
		return damaged("short value")
	}
	sum, rest := binary.LittleEndian.Uint32(value), value[checksumBytes:]
	if sum != checksum(group, index, rest) {
		return damaged("wrong checksum")
	}
	r := wire.NewReader(rest)
	l := raft.Log{Index: index, Type: raft.LogType(r.Byte()), Term: r.Uint()}
	seconds, nanos, extensions := r.Int(), r.Uint(), r.Count(1)
	if r.Failed() || nanos >= uint64(time.Second) {
		return damaged("malformed header")
	}
	l.AppendedAt = time.Unix(seconds, int64(nanos)).UTC()
	rest = r.Rest()
	if extensions > 0 {
		l.Extensions = rest[:extensions:extensions]
	}
	if data := rest[extensions:]; len(data) > 0 {
		l.Data = data
	}
	return l, nil
}
