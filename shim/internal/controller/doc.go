// Package controller mediates between Holdfast and controller plugins: it creates, registers, deletes, attaches and detaches
// volumes.
package controller
