package raftlog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"codeq/internal/integrity"
	"codeq/internal/platform"
)

// Stables keeps the terms and votes of the groups of a node. All methods, including those of what
// Group returns, may be called concurrently. The latter return ErrClosed after Close.
type Stables interface {
	Group(n uint32) raft.StableStore
	Close() error
}

// stable keeps terms and votes in a bbolt file. Each Set is synced, at any durability of the logs:
// a node that forgets its vote may vote twice.
//
// bbolt has checksums for only two of its pages, and panics at some damage, on its own goroutine.
// So Close seals the file, and OpenStable checks the seal first.
type stable struct {
	bolt *raftboltdb.BoltStore
	fs   vfs.FS // for the seal
	path string
}

// lockTimeout is how long OpenStable waits for another process that has the file open.
const lockTimeout = time.Second

// OpenStable opens the file, or creates it in a directory that exists. fs is that of the operating
// system.
func OpenStable(fs vfs.FS, path string) (Stables, error) {
	s, err := openStable(fs, path)
	if err != nil {
		return nil, fmt.Errorf("raftlog: open %s: %w", path, err)
	}
	return s, nil
}

func openStable(fs vfs.FS, path string) (*stable, error) {
	if err := integrity.UnsealFile(fs, path); err != nil {
		return nil, storageError(err)
	}
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		if err := createBolt(path); err != nil {
			return nil, err
		}
	}
	bolt, err := openBolt(path)
	if err != nil {
		return nil, err
	}
	return &stable{bolt, fs, path}, nil
}

// createBolt makes the file appear complete and durable, or not at all.
func createBolt(path string) error {
	temporary := path + ".new"
	f, err := platform.FS.Create(temporary, vfs.WriteCategoryUnspecified)
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		return err
	}
	bolt, err := openBolt(temporary)
	if err != nil {
		return err
	}
	if err := bolt.Close(); err != nil {
		return err
	}
	if err := os.Rename(temporary, path); err != nil {
		return err
	}
	return platform.SyncDirectory(platform.FS, filepath.Dir(path))
}

func openBolt(path string) (*raftboltdb.BoltStore, error) {
	bolt, err := raftboltdb.New(raftboltdb.Options{Path: path, BoltOptions: &bbolt.Options{
		Timeout:        lockTimeout,
		NoFreelistSync: true,
		FreelistType:   bbolt.FreelistMapType,
	}})
	if errors.Is(err, berrors.ErrTimeout) {
		err = &platform.Held{Path: path}
	}
	return bolt, err
}

// Group returns the values of a group.
func (s *stable) Group(n uint32) raft.StableStore { return stableGroup{s, n} }

// Close seals and releases the file. Without a seal, as after a crash, it is opened unchecked.
func (s *stable) Close() error {
	if err := s.bolt.Close(); err != nil {
		return err
	}
	return integrity.SealFile(s.fs, s.path)
}

// CheckStable compares a file that was closed with its seal.
func CheckStable(fs vfs.FS, path string) error {
	_, err := integrity.CheckFile(fs, path)
	return storageError(err)
}

func (s *stable) set(key, value []byte) error { return boltError(s.bolt.Set(key, value)) }

// get returns nil if there is no value.
func (s *stable) get(key []byte) ([]byte, error) {
	value, err := s.bolt.Get(key)
	if errors.Is(err, raftboltdb.ErrKeyNotFound) {
		return nil, nil
	}
	return value, boltError(err)
}

func boltError(err error) error {
	if errors.Is(err, berrors.ErrDatabaseNotOpen) {
		return ErrClosed
	}
	return err
}

// stableGroup is the part of a store for one group: its keys begin with the group, 4 bytes
// big-endian. A value that is missing is empty, or 0.
type stableGroup struct {
	stable *stable
	number uint32
}

func (g stableGroup) key(key []byte) []byte {
	return append(binary.BigEndian.AppendUint32(nil, g.number), key...)
}

func (g stableGroup) Set(key, value []byte) error {
	if err := g.stable.set(g.key(key), value); err != nil {
		return fmt.Errorf("raftlog: set %s of group %d: %w", key, g.number, err)
	}
	return nil
}

func (g stableGroup) Get(key []byte) ([]byte, error) {
	value, err := g.stable.get(g.key(key))
	if err != nil {
		return nil, fmt.Errorf("raftlog: get %s of group %d: %w", key, g.number, err)
	}
	return value, nil
}

func (g stableGroup) SetUint64(key []byte, value uint64) error {
	return g.Set(key, binary.BigEndian.AppendUint64(nil, value))
}

func (g stableGroup) GetUint64(key []byte) (uint64, error) {
	value, err := g.Get(key)
	switch {
	case err != nil || len(value) == 0:
		return 0, err
	case len(value) != 8:
		return 0, fmt.Errorf("%w: %s of group %d has %d bytes", ErrCorrupt, key, g.number, len(value))
	}
	return binary.BigEndian.Uint64(value), nil
}
