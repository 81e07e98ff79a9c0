package platform

// FileID tells a file from others that have, or had, the same name. It outlives a rename, a
// remount, changes of mode, owner and times, and a clone of the whole file system, but no copy.
// Device numbers are not part of it: on many file systems they change with each mount.
type FileID struct {
	Number uint64 `json:"number,omitempty"` // of the inode; 0: the file system does not say. It may be used again
	Born   int64  `json:"born,omitempty"`   // when the inode was made, in ns since 1970; 0: the file system does not say
}

// Differs reports whether the IDs are those of two files, as far as they say.
func (a FileID) Differs(b FileID) bool {
	if a.Born != 0 && b.Born != 0 && (a.Born != b.Born || bornIsFixed) {
		return a.Born != b.Born
	}
	return a.Number != 0 && b.Number != 0 && a.Number != b.Number
}
